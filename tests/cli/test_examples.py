"""The examples run: against the packaged model, a running server and a cloud of the tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GGUF = EXAMPLES.parent / "embedded" / "weights" / "pocket-small.gguf"


def run(environment: dict[str, str], folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_one_question_through_the_sdk(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(environment, tmp_path, "openai_client.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Answer: 42" in done.stdout
    assert "answered by: local" in done.stdout


def test_a_file_of_ones_own_beside_a_cloud(
    environment: dict[str, str], tmp_path: Path, fake_cloud: Callable[..., AbstractContextManager[str]]
) -> None:
    with fake_cloud() as url:
        env = {**environment, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "secret-key"}
        done = run(env, tmp_path, "own_gguf.py", str(GGUF), "big")
    assert done.returncode == 0, done.stderr
    assert "tier local" in done.stdout
    assert "tier cloud: no policy is calibrated for this pair" in done.stdout


def test_a_missing_argument_is_said(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(environment, tmp_path, "own_gguf.py")
    assert done.returncode == 1
    assert "usage:" in done.stderr


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_programs_describe_themselves(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_is_sound_shell(path: Path) -> None:
    subprocess.run(["sh", "-n", str(path)], check=True)


def test_every_example_is_listed() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = [path for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".sh", ".mjs")]
    assert files
    assert [path.name for path in files if path.relative_to(EXAMPLES).as_posix() not in page] == []
