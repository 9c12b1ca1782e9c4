"""The face of the command: help that answers at once, refused nonsense, errors in one line."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import updraft as package
from typer.testing import CliRunner
from updraft.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "version", "demo", "init", "chat", "ask", "serve", "node", "gateway", "gateway-key", "eval", "pull", "models", "rm",
    "verify", "calibrate", "learn", "feedback", "tune", "doctor", "bench", "why",
)  # fmt: skip


def test_every_command_is_listed(updraft) -> None:
    done = updraft("--help")
    assert done.returncode == 0
    listed = [line.strip("│ ").split(" ")[0] for line in done.stdout.splitlines() if line.startswith("│ ")]
    assert set(COMMANDS) <= set(listed)


def test_help_is_quick(environment) -> None:
    """In turns with the smallest command that its library can make, as the machine may be busy."""
    least = "import typer; app = typer.Typer(); app.command()(lambda: None); app(['--help'])"
    ours, bare = [], []
    for _ in range(3):
        for arguments, seconds in ((["-c", least], bare), (["-m", "updraft", "--help"], ours)):
            started = time.perf_counter()
            subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=True)
            seconds.append(time.perf_counter() - started)
    assert min(ours) < 2.5 * min(bare)


def test_help_loads_nothing_heavy(environment) -> None:
    program = (
        "import contextlib, sys; from updraft.cli.main import app\n"
        "with contextlib.suppress(SystemExit): app(['--help'])\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "typer" in loaded
    heavy = {"torch", "numpy", "sklearn", "fastapi", "httpx", "httpx2", "openai", "llama_cpp", "onnxruntime"}
    assert not loaded & heavy


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output
    if command not in ("version", "bench"):
        assert "Example" in result.output


def test_version(updraft) -> None:
    assert updraft("version").stdout.strip() == package.__version__


WRONG_CALLS = (
    "--nonsense",
    "nonsense",
    "ask",
    "ask hi --tier moon",
    "ask hi --nonsense",
    "demo --tasks 0",
    "demo --tasks x",
    "demo --tasks 100000000",
    "eval --concurrency 0",
    "serve --port 70000",
    "bench nonsense",
)


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_a_wrong_call_is_refused(call: str) -> None:
    result = CliRunner().invoke(app, call.split())
    assert result.exit_code == 2
    assert "Error" in result.output


def test_a_wrong_call_is_no_traceback(updraft) -> None:
    done = updraft("ask", "hi", "--nonsense")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--nonsense" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ask", "   "], "The question is empty"),
        (["ask", "hi", "--local", "missing.gguf"], "There is no local model 'missing.gguf'"),
        (["ask", "hi", "--local", "hf:no-file"], "hf:owner/repo:file.gguf"),
        (["ask", "hi", "--cloud", "ftp://x"], "must start with http:// or https://"),
        (["ask", "hi", "--quality", "1.5"], "quality must be above 0 and at most 1"),
        (["ask", "hi", "--cloud-share", "1.5"], "cloud_share must be from 0 to 1"),
        (["eval", "--cost", "1", "--quality", "0.9"], "quality and cost exclude each other"),
        (["ask", "hi", "--cloud-key-env", "NOT_SET"], "NOT_SET"),
        (["ask", "hi"], "No model is configured. Set local"),
        (["serve", "--port", "0"], "No model is configured. Set local"),
        (["serve", "--cloud", "http://h"], "cloud_model must be set where cloud_url is"),
        (["ask", "hi", "--local", "pocket", "--confidence", "0.8", "--cost", "1"], "cost and confidence exclude"),
        (["eval", "--tasks", "5", "--file", "x.jsonl"], "exclude each other"),
        (["eval", "--file", "missing.jsonl"], "Cannot read missing.jsonl"),
    ],
)
def test_a_failure_is_one_line(updraft, arguments: list[str], said: str) -> None:
    done = updraft(*arguments)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_debug_shows_the_traceback(updraft) -> None:
    done = updraft("ask", " ", env={"UPDRAFT_DEBUG": "1"})
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_setting_nobody_knows_is_refused(updraft) -> None:
    done = updraft("ask", "hi", "--tier", "local", env={"UPDRAFT_QUALTY": "0.9"})
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
