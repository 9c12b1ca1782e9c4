"""Subprocesses that permissions and read-only mounts restrict even if the tests run as root."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOBODY = 65534
_PR_CAPBSET_DROP = 24
_OVERRIDES = (1, 2, 3)  # capabilities CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER


def obey_permissions() -> None:
    """Drop root's capabilities to override file permissions. Runs before `exec`; does nothing for other users."""
    if os.geteuid() == 0:
        prctl = ctypes.CDLL(None).prctl
        for capability in _OVERRIDES:
            prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def python(*arguments: str, mount: str = "", **variables: str | None) -> subprocess.CompletedProcess[str]:
    """Run `python arguments...` as a user whom file permissions restrict, and return the result.

    `mount`: a shell command that runs first, in a private mount namespace. `variables` are environment variables; None
    removes a variable.
    """
    command = [sys.executable, *arguments]
    if mount:
        command = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".typing"), **variables}
    for name in ("UPDRAFT_HOME", "UPDRAFT_CONFIG", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        environment.setdefault(name, None)
        if name not in variables:
            environment[name] = None
    return subprocess.run(
        command,
        # Mounting needs capabilities. A read-only mount restricts root without dropping them.
        preexec_fn=None if mount else obey_permissions,
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def needs_mounts() -> None:
    """Skip the test if this user cannot mount in a private namespace."""
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount in a private namespace: {done.stderr.decode().strip()}")


def needs_root() -> None:
    """Skip the test unless it runs as root, because only root can give files to another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files to another user")


def of_another_user(path: Path, mode: int) -> Path:
    """Give `path` to the user `nobody`, with the permissions `mode`. Skips the test unless it runs as root."""
    needs_root()
    path.chmod(mode)
    os.chown(path, NOBODY, NOBODY)
    return path
