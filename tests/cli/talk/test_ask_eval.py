"""`updraft ask`, `eval` and `chat` against a cloud over real sockets, without a local model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

KEY = "secret"
TASKS = [
    {"prompt": "What is 2 + 2?", "answer": 4, "match": "number", "kind": "sum"},
    {"prompt": "Capital of France?", "answer": "paris", "kind": "fact"},
    {"prompt": "What is beyond?", "answer": "nothing", "kind": "fact"},
]


@pytest.fixture
def cloud(fake_cloud) -> Iterator[list[str]]:
    """The flags that name the stand-in cloud, and no local model."""
    with fake_cloud() as url:
        yield ["--cloud", url, "--cloud-model", "big", "--cloud-key-env", "CLOUD_KEY"]


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, TASKS)))
    return path


def test_ask_prints_the_answer_and_where_it_came_from(updraft, cloud) -> None:
    done = updraft("ask", "Capital of France?", *cloud, env={"CLOUD_KEY": KEY})
    assert (done.returncode, done.stdout) == (0, "Paris\n")
    assert "cloud" in done.stderr
    assert "ms" in done.stderr


def test_ask_reads_standard_input_and_can_be_quiet(updraft, cloud) -> None:
    done = updraft("ask", "-", "-q", *cloud, env={"CLOUD_KEY": KEY}, input="What is 2 + 2?\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 + 2 = 4\n", "")


def test_ask_as_json(updraft, cloud) -> None:
    done = updraft("ask", "Capital of France?", "--json", *cloud, env={"CLOUD_KEY": KEY})
    found = json.loads(done.stdout)
    assert found["answer"] == "Paris"
    assert found["updraft"]["tier"] == "cloud"
    assert found["updraft"]["cloud_tokens"] == 5


def test_the_servers_own_message_reaches_the_user(updraft, cloud) -> None:
    done = updraft("ask", "hi", *cloud, env={"CLOUD_KEY": "wrong"})
    assert done.returncode == 1
    assert "That key is unknown here." in done.stderr
    assert "Traceback" not in done.stderr


def test_eval_counts(updraft, cloud, task_file, tmp_path) -> None:
    out = tmp_path / "out.json"
    priced = {"CLOUD_KEY": KEY, "UPDRAFT_PRICES_CLOUD_INPUT": "0.5", "UPDRAFT_PRICES_CLOUD_OUTPUT": "1.5"}
    done = updraft("eval", "--file", str(task_file), "--json", str(out), *cloud, env=priced)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["tiers"] == ["cloud", "routed"]
    for tier in found["tiers"]:
        assert (found[tier]["n"], found[tier]["right"], found[tier]["failures"]) == (3, 2, 0)
        low, high = found[tier]["accuracy_interval"]
        assert low < found[tier]["accuracy"] < high
        assert found[tier]["cloud_share"] == 1
        assert found[tier]["cost_usd"] > 0
        assert found[tier]["tokens"] == {"local": 0, "cloud": 15}
    assert found["routed"]["quality_kept"] == 1
    assert found["by_kind"]["fact"] == {"n": 2, "cloud": 0.5, "routed": 0.5}
    assert "66.7%" in done.stdout


def test_eval_fails_when_an_answer_is_missing(updraft, fake_cloud, task_file) -> None:
    with fake_cloud(broken=True) as url:
        done = updraft(
            "eval",
            "--file",
            str(task_file),
            "--local",
            "none",
            "--cloud",
            url,
            "--cloud-model",
            "big",
            "--tier",
            "cloud",
        )
    assert done.returncode == 1
    assert "3 questions got no answer" in done.stderr


def test_eval_refuses_a_tier_that_is_not_there(updraft, cloud, task_file) -> None:
    done = updraft("eval", "--file", str(task_file), "--tier", "local", *cloud, env={"CLOUD_KEY": KEY})
    assert done.returncode == 2
    assert "no local tier" in done.stderr


def test_chat_answers_obeys_and_leaves_at_the_end(updraft, cloud) -> None:
    said = "What is 2 + 2?\n/tier cloud\n/quality 0.9\n/quality 7\n/help\nCapital of France?\n/new\n"
    done = updraft("chat", *cloud, env={"CLOUD_KEY": KEY}, input=said)
    assert done.returncode == 0, done.stderr
    assert "2 + 2 = 4" in done.stdout
    assert "Paris" in done.stdout
    for line in ("tier: cloud", "quality: 0.9", "unknown: /quality 7", "Ctrl-D leaves", "a new conversation"):
        assert line in done.stderr


def test_chat_survives_a_failing_answer(updraft, fake_cloud) -> None:
    with fake_cloud(broken=True) as url:
        flags = ["--cloud", url, "--cloud-model", "big", "--cloud-key-env", "CLOUD_KEY"]
        done = updraft("chat", *flags, env={"CLOUD_KEY": KEY}, input="hi\nhello\n")
    assert done.returncode == 0
    assert done.stderr.count("The cloud is out of order.") == 2
