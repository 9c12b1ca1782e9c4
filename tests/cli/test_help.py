"""The command from outside: help that answers at once, refused nonsense, errors in one line."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import pytest
import typer
import updraft as package
from typer.testing import CliRunner
from updraft.cli.main import app, main
from updraft.cli.shared import json_output
from updraft.cli.shared.command_line import Command, CommandLine, Group
from updraft.protocol.errors import (
    ConfigurationError,
    InvalidRequestError,
    ModelLoadError,
    PortInUseError,
    UpstreamError,
)

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "version", "demo", "init", "chat", "ask", "serve", "node", "gateway", "keys", "eval", "pull", "models", "rm",
    "verify", "calibrate", "learn", "feedback", "tune", "doctor", "bench", "why",
)  # fmt: skip


def test_every_command_is_listed(updraft) -> None:
    done = updraft("--help")
    assert done.returncode == 0
    listed = [line.strip("│ ").split(" ")[0] for line in done.stdout.splitlines() if line.startswith("│ ")]
    assert set(COMMANDS) <= set(listed)


def modules_after(program: str, environment: dict[str, str]) -> set[str]:
    """Run `program`, which may exit, and return the names of the modules that are then loaded."""
    program = f"import contextlib, sys\nwith contextlib.suppress(SystemExit):\n {program}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_help_loads_nothing_heavy(environment) -> None:
    """Beside the smallest command that its library can make. Modules are counted, as times depend on the load."""
    ours = modules_after("from updraft.cli.main import app; app(['--help'])", environment)
    bare = modules_after("import typer; app = typer.Typer(); app.command()(print); app(['--help'])", environment)
    assert "typer" in ours
    heavy = {"torch", "numpy", "sklearn", "fastapi", "httpx", "httpx2", "openai", "llama_cpp", "onnxruntime"}
    assert not ours & heavy
    assert len(ours) < 1.6 * len(bare)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output
    if command not in ("version", "bench", "keys"):
        assert "Example" in result.output


def test_version(updraft) -> None:
    assert updraft("version").stdout.strip() == package.__version__
    assert updraft("--version").stdout.strip() == package.__version__
    assert json.loads(updraft("version", "--json").stdout) == {"version": package.__version__}


def all_commands(group: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield prefix, group
    for name, command in getattr(group, "commands", {}).items():
        yield from all_commands(command, (*prefix, name))


TREE = dict(all_commands(typer.main.get_command(app)))
BRACKETED = re.compile(r"\[[^\[\]]*\]")


def test_every_command_is_parsed_alike() -> None:
    """`-h`, brackets in help texts, printable errors, and `--json` without a path."""
    assert {type(command) for command in TREE.values()} == {Command, Group}


def letters(text: str) -> str:
    """Without what a table's frame and line breaks change."""
    return re.sub(r"[\s│╭╮╰╯─]", "", text)


def every_option(path: tuple[str, ...]) -> list[str]:
    """The option that shows all of a command's options."""
    hides = any(getattr(param, "hidden", False) for param in TREE[path].params)
    return ["--help-all"] if hides else ["--help"]


def sources(path: tuple[str, ...]) -> list[str]:
    """The help texts as they stand in the code: of a command its docstring, and of its options the annotations."""
    command = TREE[path]
    if hasattr(command, "commands"):
        return []
    hints = get_type_hints(command.callback, include_extras=True)
    infos = [info for hint in hints.values() for info in getattr(hint, "__metadata__", ())]
    return [inspect.getdoc(command.callback) or "", *(info.help for info in infos if getattr(info, "help", None))]


@pytest.mark.parametrize("path", TREE, ids=" ".join)
def test_no_bracket_of_a_help_text_is_lost(path: tuple[str, ...]) -> None:
    shown = letters(CliRunner().invoke(app, [*path, *every_option(path)], env={"COLUMNS": "200"}).output)
    for text in sources(path):
        for bracketed in BRACKETED.findall(text):
            assert letters(bracketed) in shown, f"{bracketed} of {' '.join(path)}"


def test_help_texts_have_brackets_that_could_be_lost() -> None:
    bracketed = [each for path in TREE for text in sources(path) for each in BRACKETED.findall(text)]
    assert {"[all cores]", "[calibrate]", "[all]", "[weak]"} <= set(bracketed)


def test_an_unknown_style_in_a_help_text_is_text() -> None:
    line = CommandLine()

    @line.command()
    def only(option: Annotated[str, typer.Option(help="Take [cloud] or [/bold]. [the default]")] = "") -> None:
        """The packages of pip install '.[cloud]'."""

    output = letters(CliRunner().invoke(line, ["--help"]).output)
    assert "'.[cloud]'" in output
    assert "[cloud]or[/bold].[thedefault]" in output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(environment, shell: str) -> None:
    asked = {"_UPDRAFT_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "updraft gat", "COMP_CWORD": "1"}
    asked |= {"COMP_WORDS": "updraft gat", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    command = [sys.executable, "-m", "updraft"]
    done = subprocess.run(command, env={**environment, **asked}, capture_output=True, text=True, check=False)
    assert "gateway" in done.stdout, done.stderr
    assert "doctor" not in done.stdout


WRONG_CALLS = (
    "--nonsense",
    "nonsense",
    "ask",
    "ask hi --tier moon",
    "ask hi --nonsense",
    "demo --tasks 0",
    "demo --tasks x",
    "demo --tasks 100000000",
    "eval --max-concurrency 0",
    "serve --port 70000",
    "bench nonsense",
)


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_a_wrong_call_is_refused(call: str) -> None:
    result = CliRunner().invoke(app, call.split())
    assert result.exit_code == 2
    assert "Error" in result.output


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("ask hi --tier moon", "'--tier': 'moon' is not one of"),
        ("serve --port x", "'--port': must be an integer"),
        ("serve --port 70000", "'--port': must be at most 65535"),
        ("demo --tasks 0", "'--tasks': must be at least 20"),
        ("plan --tpot-s x", "'--tpot-s': must be a number"),
    ],
)
def test_a_wrong_value_is_refused_in_plain_words(call: str, message: str) -> None:
    result = CliRunner().invoke(app, call.split())
    assert message in " ".join(result.output.replace("│", "").split())


def test_a_wrong_call_is_no_traceback(updraft) -> None:
    done = updraft("ask", "hi", "--nonsense")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--nonsense" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ask", "   "], "The question is empty"),
        (["ask", "hi", "--local", "missing.gguf"], "There is no local model 'missing.gguf'"),
        (["ask", "hi", "--local", "missing.gguf"], "updraft models and updraft pull"),
        (["ask", "hi", "--local", "hf:no-file"], "hf:owner/repo:file.gguf"),
        (["ask", "hi", "--cloud-url", "ftp://x"], "must start with http:// or https://"),
        (["ask", "hi", "--quality", "1.5"], "quality must be above 0 and at most 1"),
        (["ask", "hi", "--cloud-share", "1.5"], "cloud_share must be from 0 to 1"),
        (["eval", "--cost", "1", "--quality", "0.9"], "quality and cost exclude each other"),
        (["ask", "hi", "--api-key-env", "NOT_SET"], "NOT_SET"),
        (["ask", "hi"], "No model is configured. Set local"),
        (["ask", "hi"], "as options (--local, --cloud-url and --cloud-model)"),
        (["node", "--model", "pocket", "--register", "http://h"], "-api-key-file or --register-api-key-env"),
        (["serve", "--port", "0"], "No model is configured. Set local"),
        (["serve", "--cloud-url", "http://h"], "cloud_model must be set with cloud_url"),
        (["ask", "hi", "--local", "pocket", "--confidence", "0.8", "--cost", "1"], "cost and confidence exclude"),
        (["calibrate", "--confidence", "0.9"], "`--confidence` is now `--promise-level`"),
        (["eval", "--tasks", "5", "--file", "x.jsonl"], "mutually exclusive"),
        (["eval", "--file", "missing.jsonl"], "Cannot read missing.jsonl"),
    ],
)
def test_a_failure_is_one_line(in_process, arguments: list[str], message: str) -> None:
    done = in_process(*arguments)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("x"), 2),
        (ConfigurationError("x"), 2),
        (PortInUseError("x"), 2),
        (UpstreamError("x"), 1),
        (ModelLoadError("x"), 1),
        (RuntimeError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr("updraft.cli.main.app", fail)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == code
    assert capsys.readouterr().out == ""


def test_exit_codes_are_documented() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    for code in ("0", "1", "2", "130"):
        assert f"| `{code}` |" in page


def test_json_with_and_without_a_path(tmp_path: Path) -> None:
    line = CommandLine()

    @line.command()
    def measured(json_path: json_output.File = None, tasks: int = 1) -> None:
        typer.echo(f"{tasks} tasks", err=json_output.is_stdout(json_path))
        json_output.write(json_path, {"tasks": tasks})

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(line, arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert run() == "1 tasks\n"
    for bare in (["--json"], ["--json", "--tasks", "1"], ["--tasks", "1", "--json"], ["--json", "-"]):
        assert json.loads(run(*bare)) == {"tasks": 1}
    assert run("--json", str(tmp_path / "out.json"), "--tasks", "3") == "3 tasks\n"
    assert json.loads((tmp_path / "out.json").read_text()) == {"tasks": 3}


WITHOUT_FACTS = {"chat", "serve", "node", "gateway", "cloud up", "cloud down", "cloud llm-config"}


@pytest.mark.parametrize("path", [path for path in TREE if path and not hasattr(TREE[path], "commands")], ids=" ".join)
def test_every_command_with_facts_has_json(path: tuple[str, ...]) -> None:
    options = {name for param in TREE[path].params for name in param.opts}
    assert ("--json" in options) != (" ".join(path) in WITHOUT_FACTS)


def test_debug_shows_the_traceback(updraft) -> None:
    done = updraft("ask", " ", env={"UPDRAFT_DEBUG": "1"})
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_setting_nobody_knows_is_refused(in_process) -> None:
    done = in_process("ask", "hi", "--tier", "local", env={"UPDRAFT_QUALTY": "0.9"})
    assert done.returncode == 2
    assert "qualty" in done.stderr


def test_the_command_is_the_module() -> None:
    """`updraft` in the virtual environment and `python -m updraft` are one command."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'updraft = "updraft.cli.main:main"' in text


def test_make_lists_its_targets() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    trainings = ("train-small", "train-large", "train-policy")
    for target in ("demo", "test", "check", "chat", "bench", "gpu", "clean", *trainings):
        assert f"{target}" in done.stdout


def test_the_setup_names_what_it_needs_from_an_old_python(tmp_path: Path) -> None:
    """The version check comes before anything an old interpreter could trip over."""
    program = (
        "import runpy, sys; sys.version_info = (3, 9, 2); sys.argv = ['bootstrap', '--venv', sys.argv[1]]\n"
        f"runpy.run_path({str(ROOT / 'cli' / 'bootstrap.py')!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "venv")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed" in done.stderr
    assert not (tmp_path / "venv").exists()
