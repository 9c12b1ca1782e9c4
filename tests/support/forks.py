"""Runs work on many files, each in a fork of one child process, which is much faster than a new Python process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def run_child(program: str, paths: Sequence[Path], **options: Any) -> list[str]:
    """Run the Python file `program`, which must call `serve_forks`, and return one outcome for each of `paths`."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, program],
        input=json.dumps([[str(path) for path in paths], options]),
        env=environ,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def serve_forks(end_of: Callable[..., str]) -> None:
    """Print `end_of(path, **options)` for every path that `run_child` sent."""
    from updraft.local_engine.llama.library import llama
    from updraft.local_engine.machine.child_process import expect_crashes

    expect_crashes()
    llama()
    paths, options = json.loads(sys.stdin.read())
    sys.stdout.write("\n" + json.dumps([end_of(Path(path), **options) for path in paths]) + "\n")


def in_fork(work: Callable[[], str], timeout_s: int) -> str:
    """Run `work` in a fork. Return its result, "untyped: ..." after an exception, or "crash: SIGSEGV" after a signal.

    SIGPROF ends the fork after `timeout_s` of processor time, SIGALRM after 20 times as long by the clock.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        signal.alarm(20 * timeout_s)
        try:
            outcome = work()
        except BaseException as error:  # noqa: BLE001 - the caller reports every exception
            outcome = f"untyped: {error!r}"
        os.write(writer, b"." + outcome.encode(errors="replace")[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as end:
        outcome = end.read().decode()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"crash: {signal.Signals(os.WTERMSIG(status)).name}"
    return outcome[1:] if outcome else f"crash: code {os.waitstatus_to_exitcode(status)}"
