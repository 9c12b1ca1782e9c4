"""SmolLM2 on the device and a cloud that knows the answers: three tasks, from nothing to decided."""

from __future__ import annotations

import itertools
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import updraft
from real_model import SMOLLM2, needs_smollm2
from updraft.router.config import RouterConfig
from updraft.router.tasks.report import TaskReport, stored_reports
from updraft.router.tasks.store import TaskStore

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ines", "Jon")
CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Delhi", "Paris", "Quito", "Seoul", "Tunis", "Vienna")
GOOD = ("wonderful", "excellent", "lovely", "delicious", "perfect", "friendly")
BAD = ("terrible", "awful", "broken", "disgusting", "rude", "useless")
THINGS = ("food", "service", "room", "film", "phone", "staff", "book", "hotel", "train", "coffee")
FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "person",
        "schema": {
            "type": "object",
            "properties": {name: {"type": "string", "enum": list(NAMES + CITIES)} for name in ("name", "city")},
            "required": ["name", "city"],
            "additionalProperties": False,
        },
    },
}


WORDS = {"structured_outputs": {"choice": ["good", "bad"]}}


def fields() -> Iterator[tuple[str, str]]:
    for name, city in itertools.product(NAMES, CITIES):
        yield f"{name} lives in {city}.", json.dumps({"name": name, "city": city})


def sentiments() -> Iterator[tuple[str, str]]:
    for thing, (word, answer) in itertools.product(THINGS, [*((w, "good") for w in GOOD), *((w, "bad") for w in BAD)]):
        yield f"The {thing} was {word}.", answer


def questions() -> Iterator[tuple[str, str]]:
    for one, other in itertools.product(range(12, 22), range(31, 41)):
        yield f"What is {one} * {other}?", f"{one * other}"


TASKS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "fields": (fields, "Write the person's name and city as JSON.", {"response_format": FORMAT}),
    "sentiment": (
        sentiments,
        "Answer with one word: good or bad.",
        {"extra_body": {"structured_outputs": {"choice": ["good", "bad"]}}},
    ),
    "questions": (questions, "Answer with one number.", {"max_tokens": 24}),
}


@contextmanager
def knowing_cloud() -> Iterator[str]:
    """Serve the right answers as an OpenAI-compatible cloud, and yield its base URL."""
    answers = {prompt: answer for make, _, _ in TASKS.values() for prompt, answer in make()}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            message = {"role": "assistant", "content": answers[body["messages"][-1]["content"]]}
            usage = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            shell = {"id": "c", "object": "chat.completion", "created": 1, "model": "sage"}
            raw = json.dumps({**shell, "choices": [choice], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def wait_for_grades(path: Path) -> None:
    """Wait until the device has answered all sampled requests, as it has time for them in a real app."""
    with closing(sqlite3.connect(path)) as connection:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            if connection.execute("SELECT count(*) FROM samples WHERE grader = ''").fetchone() == (0,):
                return
            time.sleep(0.05)
    raise TimeoutError("the device did not answer the sampled requests")


def decided(folder: Path, count: int, quality: float) -> dict[str, TaskReport]:
    """Send `count` requests of each task in turns, and return the reports by task."""
    with knowing_cloud() as url:
        config = RouterConfig(
            local=str(SMOLLM2), cloud_url=url, cloud_model="sage", learn=folder / "tasks.sqlite3", quality=quality
        )
        with updraft.OpenAI(config=config) as client:
            rounds = [list(itertools.islice(itertools.cycle(make()), count)) for make, _, _ in TASKS.values()]
            for asked in zip(*rounds, strict=True):
                for (name, (_, system, more)), (prompt, _) in zip(TASKS.items(), asked, strict=True):
                    client.chat.completions.create(
                        model="auto",
                        messages=[{"role": "system", "content": system}, {"role": "user", "content": prompt}],
                        metadata={"task": name},
                        temperature=0,
                        **more,
                    )
                wait_for_grades(folder / "tasks.sqlite3")
    with closing(TaskStore(folder / "tasks.sqlite3")) as store:
        return {report.label: report for report in stored_reports(store, quality, {})}


@needs_smollm2
@pytest.mark.soak
def test_three_tasks_are_decided(tmp_path: Path) -> None:
    """A task is licensed only if its samples prove the quality."""
    told = decided(tmp_path, 150, 0.9)
    print(told)
    for name in TASKS:
        report = told[name]
        assert report.samples >= 40
        assert (report.tier == "device") == (report.missing == 0)
    assert told["questions"].tier == "cloud"


@needs_smollm2
def test_tasks_of_a_real_model_get_their_evidence(tmp_path: Path) -> None:
    told = decided(tmp_path, 4, 0.9)
    assert {name: told[name].samples for name in TASKS} == dict.fromkeys(TASKS, 4)
    assert told["questions"].local_score is not None and told["questions"].local_score < 1
