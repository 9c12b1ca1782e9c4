"""Real server processes for tests: started, awaited, and gone with the block."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TYPING = Path(__file__).parents[2] / ".typing"
FAKE_NODE = Path(__file__).parents[1] / "cloud_engine" / "fake_node.py"


@dataclass
class Process:
    url: str
    popen: subprocess.Popen[str]


@contextmanager
def running(*command: str) -> Iterator[Process]:
    """`python command...`, from its `ready` line to its end."""
    environment = {**os.environ, "PYTHONPATH": str(TYPING), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, *command]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as popen:
        try:
            assert popen.stdout is not None
            line = popen.stdout.readline()
            assert line.startswith("ready "), f"{command} said {line!r}"
            yield Process(line.split()[1], popen)
        finally:
            popen.kill()
