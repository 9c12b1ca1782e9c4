"""A private request opens no socket on any path, also where something fails: in a process without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "private_requests.py"
EVERY_ROUTE = PROGRAM.with_name("private_routes.py")
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
    shown = _run([*(ALONE if alone else []), sys.executable, str(PROGRAM)])
    assert "a request that is not private: seen" in shown, "the audit sees sockets"


def test_private_requests_open_no_socket_by_any_endpoint() -> None:
    shown = _run([sys.executable, str(EVERY_ROUTE)])
    assert "MISSED" not in shown, "the audit sees sockets"


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SOCKET" not in done.stdout, done.stdout
    return done.stdout
