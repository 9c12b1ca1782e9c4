"""`updraft tasks` after real use: the packaged model on the device, and a cloud over sockets."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import updraft as package
from updraft.router.config import RouterConfig
from updraft_oracle import QUESTIONS, oracle

__all__ = ["oracle"]


def ask(client: Any, question: str, task: str) -> Any:
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(model="auto", messages=messages, metadata={"task": task}).model_extra[
        "updraft"
    ]


def test_tasks_are_listed_graded_pinned_and_forgotten(updraft, oracle: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    home = tmp_path / "home"
    settings = f'local = "pocket"\ncloud_url = "{oracle}"\ncloud_model = "oracle"\nlearn = true\n'
    nothing = updraft("tasks", "list")
    assert nothing.returncode == 2 and "set learn = true" in nothing.stderr
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(settings)
    config = RouterConfig(
        local="pocket",
        cloud_url=oracle,
        cloud_model="oracle",
        learn=home / "tasks.sqlite3",
        ledger=home / "ledger.sqlite3",
    )

    def listed() -> list[dict[str, Any]]:
        told = updraft("tasks", "list", "--json")
        assert told.returncode == 0, told.stderr
        return json.loads(told.stdout)

    with package.OpenAI(config=config) as client:
        infos = [ask(client, question.prompt, f"task {at % 2}") for at, question in enumerate(QUESTIONS[1:7])]
        assert {info["tier"] for info in infos} == {"cloud"}
        until = time.monotonic() + 60
        while sum(each["samples"] for each in listed()) < len(infos) and time.monotonic() < until:
            time.sleep(0.1)
        reports = {each["label"]: each for each in listed()}
        assert {name: each["samples"] for name, each in reports.items()} == {"task 0": 3, "task 1": 3}
        assert updraft("tasks", "pin", "task 0", "local").returncode == 0
        time.sleep(2.1)  # running routers look every two seconds
        ask(client, QUESTIONS[7].prompt, "task 0")
        assert ask(client, "2 + 2?", "task 0")["reason"].endswith("is pinned to the device")
    reports = {each["label"]: each for each in listed()}
    assert reports["task 0"]["tier"] == "device" and reports["task 0"]["requests"] == 5
    shown = updraft("tasks", "show", "task 1")
    assert shown.returncode == 0 and infos[1]["request_id"] in shown.stdout
    assert updraft("tasks", "grade", infos[1]["request_id"], "0", "1").returncode == 0
    assert "you" in updraft("tasks", "show", "task 1").stdout
    assert updraft("tasks", "name", "task 1", "sums").returncode == 0
    assert updraft("tasks", "merge", "task 0", "sums").returncode == 0
    (merged,) = listed()
    assert (merged["label"], merged["samples"]) == ("sums", 7)
    assert "sums" in updraft("tasks", "list").stdout
    assert infos[0]["task"] in updraft("usage", "--by", "task").stdout
    assert updraft("tasks", "forget", "sums").returncode == 0
    assert listed() == []
    unknown = updraft("tasks", "pin", "unknown", "auto")
    assert unknown.returncode == 1 and "There is no task 'unknown'" in unknown.stderr
