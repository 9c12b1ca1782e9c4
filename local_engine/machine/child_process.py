"""Runs an Updraft module in a subprocess, so that a crash, a hang or a kill does not take the app down."""

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

from ...protocol.safety.system import KILL, child_environment, disable_core_files, limit_time, python_command

_BOUNDS = "UPDRAFT_CHILD"  # environment variable: the parent's process id and the child's maximum lifetime in seconds
_GRACE_S = 5
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ChildOutcome:
    status: Literal["ok", "crashed", "timeout", "failed"]
    # Name of the signal for "crashed", exit code for "failed".
    detail: str = ""
    # Last 500 characters of the child's standard error.
    complaints: str = ""
    # The child's result for "ok".
    result: dict[str, Any] = field(default_factory=dict[str, Any])


def run_child(module: str, arguments: Sequence[str], *, timeout_s: float) -> ChildOutcome:
    """Run `python -m module arguments` with this process's `sys.path`; the last line printed must be a JSON object."""
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
        return ChildOutcome("timeout", f"more than {timeout_s:.0f} s")
    complaints = child.stderr.strip()[-500:]
    if child.returncode < 0:
        return ChildOutcome("crashed", signal.Signals(-child.returncode).name, complaints)
    try:
        return ChildOutcome("ok", result=json.loads(child.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        return ChildOutcome("failed", f"code {child.returncode}", complaints)


def expect_crashes() -> None:
    """Prepare a child that may crash: write no core file, and keep llama.cpp from starting a debugger.

    The child also ends with its parent or, on systems that cannot signal a parent's end, after the time limit.
    """
    os.environ["GGML_NO_BACKTRACE"] = "1"
    disable_core_files()
    if bounds := os.environ.pop(_BOUNDS, ""):
        parent, seconds = map(int, bounds.split())
        limit_time(0, seconds)  # ends the process even if Python's threads hang
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, KILL, 0, 0, 0)
        if sys.platform != "win32" and os.getppid() != parent:
            os._exit(1)  # the parent ended before the prctl call
