"""Two real nodes that all tests of the node's server share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import write_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", 0)


@pytest.fixture(scope="session")
def nodes(folder: Path, tmp_path_factory: pytest.TempPathFactory, spawned: Any) -> Iterator[list[str]]:
    """One without and one with a draft model."""
    draft = write_model(tmp_path_factory.mktemp("models") / "draft", 1)
    start = ("-m", "updraft", "node", "--port", "0", "--model", str(folder), "--threads", "1", "--exit-with-parent")
    with ExitStack() as stack:
        yield [stack.enter_context(spawned(*start, *extra)).url for extra in ((), ("--draft", str(draft)))]
