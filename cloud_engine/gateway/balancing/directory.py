"""The nodes that have registered, in a small file beside the key database that all workers read."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from ....protocol.errors import OverloadedError
from ....protocol.safety.shared_file import SharedFile
from ....protocol.wal import transaction
from .node import NodeAddress

LEASE_S = 10.0  # a node that sends no heartbeat for so long is gone
_MAX_NODES = 1024
_BUSY_S = 2.0
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS nodes (
      url TEXT PRIMARY KEY, concurrency INTEGER, expires_at REAL NOT NULL) WITHOUT ROWID""",
)


@dataclass(frozen=True, slots=True)
class NodeDirectory:
    """Any thread may call its methods, each of which is one transaction. They raise ConfigurationError."""

    path: Path
    # Requests at a time of a node that does not say how many it takes; None for as many as come.
    concurrency: int | None = None
    # Processes that share what a node takes.
    workers: int = 1
    # Number of this one.
    worker: int = 0

    def create(self) -> None:
        """Make the file, if there is none."""
        self._file.create(_SCHEMA)

    def register(self, url: str, concurrency: int | None) -> None:
        """Keep a node for the length of a lease. Raises OverloadedError where there are too many."""
        now = time.time()
        with self._file.connected() as connection, transaction(connection):
            connection.execute("DELETE FROM nodes WHERE expires_at <= ? OR url = ?", (now, url))
            (count,) = connection.execute("SELECT count(*) FROM nodes").fetchone()
            if count >= _MAX_NODES:
                raise OverloadedError(f"{_MAX_NODES} nodes are registered, and more are not taken.")
            connection.execute("INSERT INTO nodes VALUES (?, ?, ?)", (url, concurrency, now + LEASE_S))

    def remove(self, url: str) -> None:
        with self._file.connected() as connection:
            connection.execute("DELETE FROM nodes WHERE url = ?", (url,))

    def addresses(self) -> list[NodeAddress]:
        """The nodes whose lease lasts, with one worker's share of what they take."""
        with self._file.connected() as connection:
            rows = connection.execute("SELECT url, concurrency FROM nodes WHERE expires_at > ?", (time.time(),))
            found = [NodeAddress(url, concurrency=limit or self.concurrency) for url, limit in rows]
        return [address.of_worker(self.workers, self.worker) for address in found]

    @property
    def _file(self) -> SharedFile:
        return SharedFile(self.path, "for registered nodes", "keys", _BUSY_S)
