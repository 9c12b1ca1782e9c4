"""Commands whose caller has closed a standard stream end without a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_for

COMMANDS = [
    ["ask", "--local", "pocket", "--tier", "local", "hello"],  # `chat` starts the packaged cloud as well
    ["chat", "--local", "pocket"],
    ["models"],
    ["log"],
    ["doctor"],
    ["init"],
    ["plan", "--help"],
]


@pytest.mark.skipif(sys.platform == "win32", reason="the shell of POSIX closes the streams")
@pytest.mark.parametrize("closed", ["<&- >&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_closed_streams_cause_no_traceback(command: list[str], closed: str, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "updraft", *command]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *program]
    ended = subprocess.run(shell, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert "traceback" not in (ended.stdout + ended.stderr).lower()  # nor the hint at one
    assert ended.returncode in (0, 1, 2)


@pytest.mark.skipif(sys.platform == "win32", reason="the shell of POSIX closes the streams")
@pytest.mark.parametrize("command", [["ask", "--local", "pocket", "--tier", "local", "hi"], ["log", "--json"], ["log"]])
def test_an_answer_without_an_output_is_a_failure(command: list[str], tmp_path: Path) -> None:
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "updraft", *command]
    ended = subprocess.run(shell, stderr=subprocess.PIPE, text=True, timeout=120, check=False, cwd=tmp_path)
    assert ended.returncode == 1
    assert "error: Standard output is closed." in ended.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="the shell of POSIX closes the streams")
def test_a_daemon_needs_no_output(tmp_path: Path) -> None:
    ready = tmp_path / "url"
    options = ["--local", "none", "--cloud-url", "http://127.0.0.1:9/v1", "--cloud-model", "m", "--port", "0"]
    daemon = [sys.executable, "-m", "updraft", "serve", *options, "--ready-file", str(ready)]
    process = subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&-', "sh", *daemon], cwd=tmp_path)
    wait_for(lambda: ready.exists() or process.poll() is not None)
    process.terminate()
    assert process.wait(60) == 0
