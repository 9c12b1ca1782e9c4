"""Real server processes for the tests of node and gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from server_processes import FAKE_NODE, Process, running

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


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """The file that keeps the answers of `spawn_held_node` in flight until the test removes it."""
    file = tmp_path / "hold"
    file.touch()
    return file


@pytest.fixture
def spawn_held_node(spawn_fake_node: Spawn, hold: Path) -> Spawn:
    return lambda: spawn_fake_node("--hold", str(hold))


@pytest.fixture(scope="module")
def fake_node() -> Iterator[Process]:
    """A node that answers at 10 ms per token."""
    with running(str(FAKE_NODE), "--delay", "0.01") as process:
        yield process
