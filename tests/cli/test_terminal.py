"""Text of a cloud, an error, a file or a template cannot command the terminal, whichever command shows it."""

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ESCAPES = "\x1b]52;c;Y2FuYXJ5\x07\x1b[2J\x9b31m\x7f\u202e"
Cloud = Callable[..., AbstractContextManager[str]]


def flags(url: str) -> list[str]:
    return ["--local", "none", "--cloud-url", url, "--cloud-model", "big", "--api-key-env", "CLOUD_KEY"]


def is_plain(*texts: str) -> bool:
    return not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", "".join(texts))


def test_ask_streams_letter_by_letter(updraft, fake_cloud: Cloud) -> None:
    with fake_cloud() as url:
        done = updraft("ask", "What is evil?", *flags(url), env={"CLOUD_KEY": "secret-key"})
    assert done.stdout == "Escapes\n"
    assert is_plain(done.stderr)


def test_json_loses_nothing_and_holds_no_escape(updraft, fake_cloud: Cloud) -> None:
    with fake_cloud() as url:
        done = updraft("ask", "What is evil?", "--json", *flags(url), env={"CLOUD_KEY": "secret-key"})
    assert json.loads(done.stdout)["answer"] == f"Es{ESCAPES}capes"
    assert not set(done.stdout) & set("\x1b\x9b\x7f\u202e")


def test_chat(updraft, fake_cloud: Cloud) -> None:
    with fake_cloud() as url:
        done = updraft("chat", *flags(url), env={"CLOUD_KEY": "secret-key"}, input="What is evil?\n/\x1b[2J\n")
    assert "Escapes" in done.stdout
    assert is_plain(done.stdout, done.stderr.replace("\x1b[2m", "").replace("\x1b[0m", ""))


@pytest.mark.parametrize("command", ["ask", "chat"])
def test_errors(updraft, fake_cloud: Cloud, command: str) -> None:
    words = ["ask", "hi"] if command == "ask" else ["chat"]
    with fake_cloud(broken=True) as url:
        done = updraft(*words, *flags(url), env={"CLOUD_KEY": "secret-key"}, input="hi\n")
    assert "The cloud is out of order." in done.stderr
    assert is_plain(done.stdout, done.stderr)


def test_names_of_files_and_models(updraft, environment: dict[str, str]) -> None:
    models = Path(environment["UPDRAFT_HOME"]) / "models"
    models.mkdir()
    (models / "a.gguf").write_bytes(b"GGUF")
    facts = {"name": "a", "source": f"https://host/{ESCAPES}", "size": 4, "sha256": "0", "published": False}
    (models / "a.json").write_text(json.dumps({**facts, "pulled_at": ESCAPES, "licence": ESCAPES}))
    listed = updraft("models")
    assert "https://host/" in listed.stdout
    missing = updraft("ask", "hi", "--tier", "local", "--local", f"{ESCAPES}.gguf")
    assert missing.returncode
    assert is_plain(listed.stdout, listed.stderr, missing.stdout, missing.stderr)


@pytest.mark.parametrize(
    "words", [[f"na{ESCAPES}me"], ["ask", f"--x{ESCAPES}", "hi"], ["log", ESCAPES], ["ask", "--tier", ESCAPES, "hi"]]
)
def test_calls_that_are_wrong(updraft, words: list[str]) -> None:
    done = updraft(*words)
    assert done.returncode == 2
    assert is_plain(done.stdout, done.stderr)


def test_ledger_rows_are_printable(updraft, fake_cloud: Cloud) -> None:
    with fake_cloud(broken=True) as url:
        updraft("ask", "hi", *flags(url), env={"CLOUD_KEY": "secret-key"})
    why, raw = updraft("why"), updraft("why", "--json")
    assert is_plain(why.stdout, why.stderr, raw.stdout)


def test_every_command_writes_through_one_place() -> None:
    """Scripts that run before the package is installed, and the pages of the reference, show nothing of others."""
    own = {"cli/bootstrap.py", "cli/shared/output.py", "cli/shared/console.py"}
    ways = re.compile(
        r"typer\.s?echo|rich\.console import|click\.s?echo|^\s*print\(|sys\.std(out|err)\.write", re.MULTILINE
    )
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "cli").rglob("*.py")}
    assert {name for name, text in sources.items() if ways.search(text)} - own == set()
