"""The packaged cloud on this machine: nodes serving pocket-large and the gateway in front of them, as real processes."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .processes import Child, ChildError, stop_all

KEY_NAME = "UPDRAFT_POCKET_KEY"


@dataclass(frozen=True, slots=True)
class PocketCloud:
    """A running gateway. `base_url` ends in /v1; `api_key` is the only key it takes, made for this run."""

    base_url: str
    api_key: str
    nodes: list[Child]
    gateway: Child

    @property
    def pids(self) -> dict[str, int]:
        return {child.name: child.pid for child in (*self.nodes, self.gateway)}


@contextmanager
def pocket_cloud(*, nodes: int = 1, say: Callable[[str], None] = lambda _line: None) -> Iterator[PocketCloud]:
    """Start it, wait until it answers, and leave no process behind however the block ends.

    Logs are kept, and their folder named, only if something failed. Raises ChildError if it does not come up.
    """
    folder = Path(tempfile.mkdtemp(prefix="updraft-"))
    children: list[Child] = []
    try:
        yield _start(folder, children, nodes, say)
    except ChildError:
        say(f"logs: {folder}")
        raise
    except BaseException:
        stop_all(children)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    else:
        stop_all(children)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        stop_all(children)
