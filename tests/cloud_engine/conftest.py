"""Real server processes for the tests of node and gateway."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

TYPING = Path(__file__).parents[2] / ".typing"
FAKE_NODE = Path(__file__).with_name("fake_node.py")


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


Spawn = Callable[..., Process]


@pytest.fixture(scope="session")
def spawned() -> Callable[..., AbstractContextManager[Process]]:
    """For fixtures that outlive a test."""
    return running


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    with ExitStack() as stack:
        yield lambda *command: stack.enter_context(running(*command))


@pytest.fixture
def spawn_fake_node(spawn: Spawn) -> Spawn:
    return lambda *arguments: spawn(str(FAKE_NODE), *arguments)


@pytest.fixture(scope="module")
def fake_node() -> Iterator[Process]:
    """One that answers at 10 ms a token."""
    with running(str(FAKE_NODE), "--delay", "0.01") as process:
        yield process
