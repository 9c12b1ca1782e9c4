"""Runs one of our modules in a process of its own: what may crash, hang or be killed must not take the app with it."""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...protocol.safety.python_process import child_environment, python_command
from ...protocol.safety.system import KILL, limit_time, no_core_files

_BOUNDS = "UPDRAFT_CHILD"  # the parent's id, and how long a child may live in seconds
_GRACE_S = 5
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """The end of a child process."""

    status: Literal["ok", "crashed", "timeout", "failed"]
    # The name of the signal that "crashed" it, or the code it "failed" with.
    detail: str = ""
    # The end of its standard error.
    complaints: str = ""
    # The child's result, if it is "ok".
    found: dict[str, Any] = field(default_factory=dict[str, Any])


def run_child(module: str, arguments: Sequence[str], *, timeout_s: float) -> ChildEnd:
    """Run `python -m module arguments`, whose last line on standard output is a JSON object, with this `sys.path`."""
    bounds = f"{os.getpid()} {math.ceil(timeout_s) + _GRACE_S}"
    try:
        child = subprocess.run(
            python_command("-m", module, *arguments),
            env=child_environment(**{_BOUNDS: bounds}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ChildEnd("timeout", f"more than {timeout_s:.0f} s")
    complaints = child.stderr.strip()[-500:]
    if child.returncode < 0:
        return ChildEnd("crashed", signal.Signals(-child.returncode).name, complaints)
    try:
        return ChildEnd("ok", found=json.loads(child.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        return ChildEnd("failed", f"code {child.returncode}", complaints)


def expect_crashes() -> None:
    """For a child whose crash is an expected outcome: no core file, and no debugger called by llama.cpp for a trace.

    Its end is expected, too: with its parent, who may be killed, and where a system has no such tie, a little after the
    time that the parent gave it.
    """
    os.environ["GGML_NO_BACKTRACE"] = "1"
    no_core_files()
    if bounds := os.environ.pop(_BOUNDS, ""):
        parent, seconds = map(int, bounds.split())
        limit_time(0, seconds)  # ends it even where Python's own threads stand still
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, KILL, 0, 0, 0)
        if sys.platform != "win32" and os.getppid() != parent:
            os._exit(1)  # the parent died before that
