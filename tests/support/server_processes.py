"""Real server processes for tests, which run until the end of a `with` block."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TYPING = Path(__file__).parents[2] / ".typing"
FAKE_NODE = Path(__file__).parents[1] / "cloud_engine" / "fake_node.py"

#: `python -c TINY_LIMIT COMMAND...` runs `updraft COMMAND...` with at most 256 file descriptors.
TINY_LIMIT = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); "
TINY_LIMIT += "sys.argv = ['updraft', *sys.argv[1:]]; runpy.run_module('updraft', run_name='__main__')"


@dataclass
class Process:
    url: str
    popen: subprocess.Popen[str]


@contextmanager
def running(
    *command: str,
    log: Path | None = None,
    umask: int = -1,
    python: str = sys.executable,
    cwd: Path | None = None,
    **variables: str,
) -> Iterator[Process]:
    """Run `python command...`: yield the process once it is ready, and kill it at the end of the block.

    The process is ready when it prints `ready URL`. `log`: file for its standard error.
    """
    environment = {**os.environ, "PYTHONPATH": str(TYPING), "OMP_NUM_THREADS": "1", **variables}
    with (
        contextlib.nullcontext() if log is None else log.open("w") as errors,
        subprocess.Popen(
            [python, *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            umask=umask,
            cwd=cwd,
        ) as popen,
    ):
        try:
            assert popen.stdout is not None
            line = popen.stdout.readline()
            assert line.startswith("ready "), f"{command} said {line!r}"
            yield Process(line.split()[1], popen)
        finally:
            popen.kill()
