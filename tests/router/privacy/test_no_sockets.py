"""A private request opens no socket on any path, also where something fails: in a process without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "private_requests.py"
#: A namespace of its own has no network but a loopback that is down.
ALONE = ["unshare", "--user", "--map-root-user", "--net"]


def _isolated() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*ALONE, "true"], capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("alone", [False, True], ids=["audited", "namespace"])
def test_private_requests_open_no_socket_on_any_path(alone: bool) -> None:
    if alone and not _isolated():
        pytest.skip("this kernel gives no network namespaces to users")
    command = [*(ALONE if alone else []), sys.executable, str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SOCKET" not in done.stdout
    assert "a request that is not private: seen" in done.stdout, "the audit sees sockets"
