"""`updraft ask`, `eval` and `chat` against a cloud over real sockets, without a local model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminal import at_terminal

KEY = "secret-key"
TASKS = [
    {"prompt": "What is 2 + 2?", "answer": 4, "match": "number", "kind": "sum"},
    {"prompt": "Capital of France?", "answer": "paris", "kind": "fact"},
    {"prompt": "What is beyond?", "answer": "nothing", "kind": "fact"},
]


@pytest.fixture
def cloud(fake_cloud) -> Iterator[list[str]]:
    """The flags that name the stand-in cloud, and no local model."""
    with fake_cloud() as url:
        yield ["--cloud-url", url, "--cloud-model", "big", "--api-key-env", "CLOUD_KEY"]


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


def test_ask_reads_standard_input_and_can_be_quiet(in_process, cloud) -> None:
    done = in_process("ask", "-", "-q", *cloud, env={"CLOUD_KEY": KEY}, input="What is 2 + 2?\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 + 2 = 4\n", "")


def test_an_absent_local_model_leaves_the_cloud_to_answer(in_process, cloud) -> None:
    done = in_process("ask", "Capital of France?", "--local", "absent.gguf", *cloud, env={"CLOUD_KEY": KEY})
    assert (done.returncode, done.stdout) == (0, "Paris\n")
    assert "no model on the device: Cannot open the model file absent.gguf" in done.stderr
    done = in_process("ask", "Hi", "--tier", "local", "--local", "absent.gguf", *cloud, env={"CLOUD_KEY": KEY})
    assert (done.returncode, done.stdout) == (1, "")


def test_ask_as_json(in_process, cloud) -> None:
    done = in_process("ask", "Capital of France?", "--json", *cloud, env={"CLOUD_KEY": KEY})
    reply = json.loads(done.stdout)
    assert reply["answer"] == "Paris"
    assert reply["updraft"]["tier"] == "cloud"
    assert reply["updraft"]["cloud_tokens"] == 5


@pytest.mark.parametrize("on_error", ["strict", "surrogateescape"])
def test_bytes_that_are_no_text_are_refused(updraft, cloud, on_error: str) -> None:
    given, env = "Capital\udcff of France?", {"CLOUD_KEY": KEY, "PYTHONIOENCODING": f"utf-8:{on_error}"}
    for words, options in ((["-"], {"input": given, "errors": "surrogateescape"}), ([given], {})):
        done = updraft("ask", *words, "-q", *cloud, env=env, **options)
        assert (done.returncode, done.stdout) == (2, "")
        assert "not UTF-8 text" in done.stderr


def test_odd_arguments_are_named_and_not_quoted_from_python(in_process, tmp_path: Path) -> None:
    folder = in_process("keys", "create", "a", "--keys", str(tmp_path))
    assert folder.returncode == 2 and f"Cannot use {tmp_path} as the key database" in " ".join(folder.stderr.split())
    assert in_process("log", "-n", "9" * 30).returncode == 2


def test_ask_says_how_to_sample(updraft) -> None:
    here = ["ask", "What is 17 + 25?", "--local", "pocket", "--tier", "local"]
    assert "42" in updraft(*here, "--temperature", "0", "--seed", "7").stdout
    refused = updraft(*here, "--temperature", "5")
    assert refused.returncode == 1
    assert "temperature must be between 0 and 2" in refused.stderr


def test_the_servers_own_message_reaches_the_user(in_process, cloud) -> None:
    done = in_process("ask", "hi", *cloud, env={"CLOUD_KEY": "wrong-key"})
    assert done.returncode == 1
    assert "That key is unknown here." in done.stderr
    assert "Traceback" not in done.stderr


def test_eval_counts(in_process, cloud, task_file, tmp_path) -> None:
    out = tmp_path / "out.json"
    priced = {"CLOUD_KEY": KEY, "UPDRAFT_PRICES_CLOUD_INPUT": "0.5", "UPDRAFT_PRICES_CLOUD_OUTPUT": "1.5"}
    done = in_process("eval", "--file", str(task_file), "--json", str(out), *cloud, env=priced)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["tiers"] == ["cloud", "routed"]
    for tier in report["tiers"]:
        assert (report[tier]["n"], report[tier]["right"], report[tier]["failures"]) == (3, 2, 0)
        low, high = report[tier]["accuracy_interval"]
        assert low < report[tier]["accuracy"] < high
        assert report[tier]["cloud_share"] == 1
        assert report[tier]["cost_usd"] > 0
        assert report[tier]["tokens"] == {"local": 0, "cloud": 15}
    assert report["routed"]["quality_kept"] == 1
    assert report["by_kind"]["fact"] == {"n": 2, "cloud": 0.5, "routed": 0.5}
    assert "66.7%" in done.stdout


def test_eval_fails_when_an_answer_is_missing(in_process, fake_cloud, task_file) -> None:
    with fake_cloud(broken=True) as url:
        done = in_process(
            "eval",
            "--file",
            str(task_file),
            "--local",
            "none",
            "--cloud-url",
            url,
            "--cloud-model",
            "big",
            "--tier",
            "cloud",
        )
    assert done.returncode == 1
    assert "3 questions got no answer: 3 AuthenticationError. First error: AuthenticationError: " in done.stderr
    assert done.stderr.rstrip().endswith("That key is unknown here.")


def test_eval_counts_errors_by_kind_and_prints_nothing_but_json(in_process, fake_cloud, task_file) -> None:
    with fake_cloud(broken=True) as url:
        flags = ["--cloud-url", url, "--cloud-model", "big", "--api-key-env", "CLOUD_KEY"]
        done = in_process("eval", "--file", str(task_file), "--json", *flags, env={"CLOUD_KEY": KEY})
    assert done.returncode == 1
    errors = json.loads(done.stdout)["errors"]
    assert (errors["count"], errors["by_kind"]) == (6, {"BadRequestError": 6})
    assert errors["first"].startswith("BadRequestError: The cloud is out of order.")
    assert not {"\x1b", "\x7f", "\u202e"} & set(done.stdout + done.stderr)
    assert "6 questions got no answer: 6 BadRequestError. First error: BadRequestError: The cloud is" in done.stderr


def test_an_unknown_cloud_model_is_named_with_those_there_are(in_process, cloud) -> None:
    done = in_process("ask", "hi", *cloud, "--cloud-model", "unheard-of", env={"CLOUD_KEY": KEY})
    assert done.returncode == 1
    assert f"No such model. {cloud[1]} has no model 'unheard-of'. Known models: big, small." in done.stderr


def test_eval_refuses_a_tier_that_is_not_there(in_process, cloud, task_file) -> None:
    done = in_process("eval", "--file", str(task_file), "--tier", "local", *cloud, env={"CLOUD_KEY": KEY})
    assert done.returncode == 2
    assert "No local tier" in done.stderr


def test_chat_answers_obeys_and_leaves_at_the_end(updraft, cloud) -> None:
    lines = "What is 2 + 2?\n/tier cloud\n/quality 0.9\n/quality 7\n/help\nCapital of France?\n/new\n"
    done = updraft("chat", *cloud, env={"CLOUD_KEY": KEY}, input=lines)
    assert done.returncode == 0, done.stderr
    assert "2 + 2 = 4" in done.stdout
    assert "Paris" in done.stdout
    for line in ("tier: cloud", "quality: 0.9", "unknown command: /quality 7", "Ctrl-D", "new conversation"):
        assert line in done.stderr


@pytest.mark.parametrize("word", ["exit", "quit", "/exit", "/quit", "EXIT"])
def test_chat_is_left_by_a_word(in_process, cloud, word: str) -> None:
    done = in_process("chat", *cloud, env={"CLOUD_KEY": KEY}, input=f"{word}\nCapital of France?\n")
    assert (done.returncode, "Paris" in done.stdout) == (0, False)


def test_chat_tells_models_and_why(in_process, cloud) -> None:
    lines = "/why\n/model\n/model big\n/model moon\nCapital of France?\n/why\n"
    done = in_process("chat", *cloud, env={"CLOUD_KEY": KEY}, input=lines)
    assert done.returncode == 0, done.stderr
    for line in (
        "There is no answer yet.",
        "model: auto; known: auto, local, cloud, big",
        "model: big\n",
        "There is no model 'moon'. Known: auto, local, cloud, big",
        "by the cloud",
        "because",
        "tokens",
    ):
        assert line in done.stderr, line


def test_chat_breaks_lines_between_words(environment, cloud, tmp_path: Path) -> None:
    """A narrow terminal: `2 + 2 = 4` does not fit."""
    narrow = {**environment, "CLOUD_KEY": KEY, "COLUMNS": "6"}
    code, shown = at_terminal(["chat", *cloud], [("> ", "What is 2 + 2?"), ("> ", "quit")], narrow, tmp_path)
    assert code == 0, shown
    assert "2 + 2\r\n= 4\r\n" in shown


def test_chat_survives_a_failing_answer(in_process, fake_cloud) -> None:
    with fake_cloud(broken=True) as url:
        flags = ["--cloud-url", url, "--cloud-model", "big", "--api-key-env", "CLOUD_KEY"]
        done = in_process("chat", *flags, env={"CLOUD_KEY": KEY}, input="hi\nhello\n")
    assert done.returncode == 0
    assert done.stderr.count("The cloud is out of order.") == 2


def test_chat_continues_with_a_damaged_ledger(in_process, cloud, environment) -> None:
    (Path(environment["UPDRAFT_HOME"]) / "ledger.sqlite3").write_bytes(b"no database, " * 1000)
    done = in_process("chat", *cloud, env={"CLOUD_KEY": KEY}, input="/model\n/tier cloud\n")
    assert done.returncode == 0
    assert "tier: cloud" in done.stderr
