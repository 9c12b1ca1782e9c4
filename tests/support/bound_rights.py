"""Processes that permissions bind, also where tests run as root, and folders that nobody can write to."""

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
_OVERRIDES = (1, 2, 3)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER


def obey_permissions() -> None:
    """Before `exec`: root loses the rights that go past the bits of files. Others never had them."""
    if os.geteuid() == 0:
        prctl = ctypes.CDLL(None).prctl
        for capability in _OVERRIDES:
            prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def python(*arguments: str, mount: str = "", **variables: str | None) -> subprocess.CompletedProcess[str]:
    """`python arguments...` under permissions. `mount`: a shell command that runs first, in mounts of its own.

    A variable that is None is removed.
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
        preexec_fn=None if mount else obey_permissions,  # mounting wants rights; a read-only mount binds root, too
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def needs_mounts() -> None:
    """Skip where this user cannot mount in a namespace of its own."""
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mounts of its own: {done.stderr.decode().strip()}")


def needs_root() -> None:
    """Skip where files cannot be given to another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files to another user")


def of_another_user(path: Path, mode: int) -> Path:
    """Give the path away."""
    needs_root()
    path.chmod(mode)
    os.chown(path, NOBODY, NOBODY)
    return path
