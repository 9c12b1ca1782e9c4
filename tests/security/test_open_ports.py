"""No server opens its port to other machines without a key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from server_processes import TYPING

COMMANDS = {
    "node": ["node", "--model", "pocket"],
    "gateway": ["gateway", "--node", "http://127.0.0.1:1", "--no-auth"],
    "serve": ["serve", "--local", "pocket"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_a_key_it_does_not_start(command: str, host: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(TYPING), "UPDRAFT_HOME": str(tmp_path)}
    environment.pop("UPDRAFT_NODE_API_KEY", None)
    arguments = [sys.executable, "-m", "updraft", *COMMANDS[command], "--host", host, "--port", "0"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "without a key" in " ".join(done.stderr.split())
    assert done.stdout == ""
