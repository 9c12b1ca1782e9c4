"""Tries to load many GGUF files as an app does, each in a forked process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forks import in_fork, run_child, serve_forks

TIMEOUT_S = 5


def try_all(paths: Sequence[Path]) -> list[str]:
    """Return the result of `trial_load.attempt` for each file: "" if valid, the reason if not, or "crash: SIGSEGV"."""
    return run_child(__file__, paths)


def _end_of(path: Path) -> str:
    from updraft.local_engine.trial_load import attempt

    return in_fork(lambda: attempt(path), TIMEOUT_S)


if __name__ == "__main__":
    serve_forks(_end_of)
