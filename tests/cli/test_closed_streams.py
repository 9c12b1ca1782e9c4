"""Commands whose caller has closed a standard stream end without a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
