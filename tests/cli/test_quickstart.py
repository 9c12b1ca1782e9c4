"""The quick start runs as it is written, in a shell and against the real models of the package.

`make demo` is left out: `test_demo.py` runs that command. `. .venv/bin/activate` becomes the environment of the tests,
and the server takes a free port.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"


def block(section: int, language: str) -> str:
    """The block of a numbered section."""
    (part,) = re.findall(rf"^## {section}\. .*?(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    return text


@pytest.fixture
def shell(environment: dict[str, str], tmp_path: Path):
    """Run a script with `updraft` on the path; it stops at the first command that fails."""
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "updraft"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m updraft "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(folder), environment["PATH"]])

    def run(script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-e", "-m", "-c", script],
            env={**environment, "PATH": path},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


def test_the_demo_is_the_command_that_is_tested() -> None:
    assert block(1, "sh") == "make demo\n"


@pytest.mark.slow
def test_a_question_is_answered_and_explained(shell) -> None:
    assert block(2, "sh") == ". .venv/bin/activate\n"
    done = shell(block(3, "sh") + block(4, "sh"))
    assert done.returncode == 0, done.stderr
    assert "42" in done.stdout
    assert "gate" in done.stdout


def test_the_program_runs(environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", block(5, "python")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "42" in done.stdout
    assert "local because" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_server_answers_curl(shell) -> None:
    serve = block(6, "sh").replace("\n", " --port 0 --ready-file url.txt &\n")
    ask = block(7, "sh").replace("http://127.0.0.1:4114", "$(cat url.txt)")
    done = shell(f"{serve}until [ -s url.txt ]; do sleep 0.2; done\n{ask}kill %1\n")
    assert done.returncode == 0, done.stderr
    assert '"content":"' in done.stdout.replace('": "', '":"')
    assert '"tier":"local"' in done.stdout.replace('": "', '":"')
