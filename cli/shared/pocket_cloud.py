"""The packaged cloud on this machine: processes of nodes that serve pocket-large, and of a gateway in front."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ...protocol.errors import UpdraftError
from .processes import Child, stop_all


@dataclass(frozen=True, slots=True)
class PocketCloud:
    """A running gateway and its nodes. `base_url` ends in /v1; `api_key` is the only valid key, made for this run."""

    base_url: str
    api_key: str = field(repr=False)
    nodes: list[Child]
    gateway: Child

    @property
    def pids(self) -> dict[str, int]:
        return {child.name: child.pid for child in (*self.nodes, self.gateway)}


@contextmanager
def pocket_cloud(*, nodes: int = 1, say: Callable[[str], None] = lambda _line: None) -> Iterator[PocketCloud]:
    """Start the packaged cloud, wait until it is ready, and stop all its processes when the block ends.

    If the block raises an UpdraftError, `say` receives the folder of the logs. Raises ChildError if no process starts.
    """
    folder = Path(tempfile.mkdtemp(prefix="updraft-"))
    children: list[Child] = []
    keep_logs = False
    try:
        say(f"Starting the packaged cloud on this machine: {nodes} node{'s' * (nodes > 1)} and a gateway ...")
        yield _start(folder, children, nodes, say)
    except UpdraftError:
        keep_logs = True
        raise
    finally:
        try:
            stop_all(children)
        finally:  # a second Ctrl-C can interrupt stop_all
            if keep_logs:
                say(f"The logs of the processes are in {folder}")
            else:
                shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, children: list[Child], nodes: int, say: Callable[[str], None]) -> PocketCloud:
    """Start all nodes at once, then the gateway. Each process is added to `children` as soon as it runs."""
    from ...cloud_engine.gateway.access.database import KeyDatabase, NewKey
    from ...embedded import pocket

    node = ["node", "--model", str(pocket.pocket_large_folder()), "--threads", "1"]
    node += ["--draft", str(pocket.pocket_small_folder())]
    for number in range(1, nodes + 1):
        children.append(Child(f"node-{number}", "updraft", node, folder))
    started = list(children)
    urls = [child.wait_ready(say=say) for child in started]
    keys = folder / "keys.sqlite3"
    _, key = KeyDatabase(keys).create(NewKey("pocket"), "updraft")
    arguments = ["gateway", *(word for url in urls for word in ("--node", url))]
    arguments += ["--keys", str(keys), "--ledger", str(folder / "gateway.sqlite3")]
    gateway = Child("gateway", "updraft", arguments, folder)
    children.append(gateway)
    return PocketCloud(f"{gateway.wait_ready(say=say)}/v1", key, started, gateway)
