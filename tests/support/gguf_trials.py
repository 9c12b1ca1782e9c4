"""Loads many files as an app would, each in a fork: how each ended, in milliseconds instead of a Python start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PATIENCE_S = 5


def try_all(paths: Sequence[Path]) -> list[str]:
    """For each file what `trial.attempt` says: "" for a sound one, its complaint, or "crash: SIGSEGV"."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([str(path) for path in paths]),
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    from updraft.local_engine.llama.library import llama
    from updraft.local_engine.machine.child_process import expect_crashes

    expect_crashes()
    llama()
    sys.stdout.write("\n" + json.dumps([_in_fork(Path(name)) for name in json.loads(sys.stdin.read())]) + "\n")


def _in_fork(path: Path) -> str:
    from updraft.local_engine.trial_load import attempt

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)
        try:
            outcome = attempt(path)
        except Exception as error:  # noqa: BLE001 - what is to be found
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


if __name__ == "__main__":
    main()
