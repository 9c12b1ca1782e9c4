"""Running the command as a person does: in a process with a home of its own, against a cloud over real sockets."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from homes import home_in
from updraft.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
Updraft = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """No settings and no state but the test's own, and this tree as `updraft`. Native code is not built for each."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("UPDRAFT_")}
    path = os.pathsep.join(filter(None, [str(ROOT / ".typing"), os.environ.get("PYTHONPATH")]))
    return {**ours, "PYTHONPATH": path, "UPDRAFT_HOME": str(home_in(tmp_path)), "COLUMNS": "120", "NO_COLOR": "1"}


@pytest.fixture
def updraft(environment: dict[str, str], tmp_path: Path) -> Updraft:
    """Run `updraft ARGUMENTS`; `env` adds to the environment, `input` is what it reads."""

    def run(*arguments: str, env: dict[str, str] | None = None, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # type: ignore[call-overload, no-any-return]
            [sys.executable, "-m", "updraft", *arguments],
            env={**environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            cwd=tmp_path,
            **options,
        )

    return run


@pytest.fixture
def in_process(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Updraft:
    """The same in this process, which spares the start of another: for commands that load no model."""

    def run(*arguments: str, env: dict[str, str] | None = None, **options: str) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patched:
            for name in os.environ.keys() - environment.keys():
                patched.delenv(name)
            for name, value in {**environment, **(env or {})}.items():
                patched.setenv(name, value)
            patched.chdir(tmp_path)
            patched.setattr(sys, "argv", ["updraft", *arguments])
            patched.setattr(sys, "stdin", io.StringIO(options.get("input", "")))
            with pytest.raises(SystemExit) as ended:
                main()
        return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), *capfd.readouterr())

    return run


@pytest.fixture
def fake_cloud() -> Callable[..., AbstractContextManager[str]]:
    """`with fake_cloud() as url`: a running cloud whose key is "secret-key"; `broken=True` refuses every question,
    and `answers` are what it knows."""
    return running_cloud


KEY = "secret-key"
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
ESCAPES = "\x1b]52;c;Y2FuYXJ5\x07\x1b[2J\x9b31m\x7f\u202e"
ANSWERS = {"What is 2 + 2?": "2 + 2 = 4", "Capital of France?": "Paris", "What is evil?": f"Es{ESCAPES}capes"}


class CloudHandler(BaseHTTPRequestHandler):
    """A stand-in for somebody's OpenAI endpoint that knows a few answers."""

    protocol_version = "HTTP/1.1"
    broken = False
    answers: Mapping[str, str] = ANSWERS

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers.get("authorization") != f"Bearer {KEY}":
            return self.reply({"error": {"message": "That key is unknown here.", "type": "x", "code": "k"}}, 401)
        if request["model"] == "unheard-of":
            error = {"message": "No such model.", "type": "x", "param": "model", "code": "model_not_found"}
            return self.reply({"error": error}, 404)
        if self.broken:
            return self.reply(
                {"error": {"message": f"The cloud is out of order.{ESCAPES}", "type": "x", "code": "k"}}, 400
            )
        answer = self.answers.get(request["messages"][-1]["content"], "I do not know.")
        if request.get("stream"):
            return self.stream(answer, request["model"])
        return self.reply({**completion(answer), "model": request["model"]})

    def do_GET(self) -> None:
        """The list of models, which is all that is asked for."""
        self.reply({"object": "list", "data": [{"id": name, "owned_by": "somebody"} for name in ("big", "small")]})

    def reply(self, body: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, answer: str, model: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        pieces = [{"role": "assistant", "content": ""}, *({"content": letter} for letter in answer), {}]
        for number, delta in enumerate(pieces):
            choice = {"index": 0, "delta": delta, "finish_reason": "stop" if number == len(pieces) - 1 else None}
            self.event({"model": model, "choices": [choice]})
        self.event({"model": model, "choices": [], "usage": USAGE})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, fields: dict[str, Any]) -> None:
        head = {"id": "c1", "object": "chat.completion.chunk", "created": 1}
        self.wfile.write(b"data: " + json.dumps({**head, **fields}).encode() + b"\n\n")

    def log_message(self, *_arguments: object) -> None:
        """Keep the test's output clean."""


def completion(answer: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    return {
        "id": "c1", "object": "chat.completion", "created": 1, "model": "big", "choices": [choice], "usage": USAGE,
    }  # fmt: skip


@contextmanager
def running_cloud(*, broken: bool = False, answers: Mapping[str, str] = ANSWERS) -> Iterator[str]:
    """The base URL of a running endpoint."""
    handler = type("Cloud", (CloudHandler,), {"broken": broken, "answers": answers})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()
