"""The directory of registered nodes: a SQLite file next to the key database, read by all workers."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from ....protocol.errors import NotFoundError, OverloadedError
from ....protocol.safety.database import SharedFile, transaction
from ....protocol.safety.system import boot_id, boot_time
from .node import NodeAddress

LEASE_S = 10.0  # lease of a node, in seconds; a node that sends no heartbeat for this long is dropped
_MAX_NODES = 1024
_BUSY_S = 2.0
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS leases (
      url TEXT PRIMARY KEY, concurrency INTEGER, is_proven INTEGER NOT NULL,
      boot TEXT NOT NULL, expires_at REAL NOT NULL) WITHOUT ROWID""",
)


@dataclass(frozen=True, slots=True)
class NodeDirectory:
    """Leases of nodes in SQLite. Each method is one transaction and thread-safe. Methods raise ConfigurationError."""

    path: Path
    # Maximum requests in flight on a node that reports no limit; None: unlimited.
    concurrency: int | None = None
    # Number of gateway workers that share each node's limit.
    workers: int = 1
    # Index of this gateway worker.
    worker: int = 0

    def create(self) -> None:
        """Create the file if it does not exist."""
        self._file.create(_SCHEMA)

    def register(self, url: str, concurrency: int | None, *, is_proven: bool) -> None:
        """Register a node, or renew its lease, for `LEASE_S` seconds. Raises OverloadedError if the directory is full.

        `is_proven`: whether the node has proved that it knows the shared node key. An unproven heartbeat cannot replace
        a proven lease, since any holder of a registration key could claim another node's URL.
        """
        now, boot = boot_time(), boot_id()
        with self._file.connected() as connection, transaction(connection):
            connection.execute("DELETE FROM leases WHERE expires_at <= ? OR boot <> ?", (now, boot))
            if not _delete_lease(connection, url, is_proven):
                return
            (count,) = connection.execute("SELECT count(*) FROM leases").fetchone()
            if count >= _MAX_NODES:
                raise OverloadedError(f"The node directory is full: {_MAX_NODES} nodes are registered.")
            row = url, concurrency, is_proven, boot, now + LEASE_S
            connection.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?)", row)

    def remove(self, url: str, *, is_proven: bool) -> bool:
        """Drop the lease of a node. Return False if the lease is proven and `is_proven` is not set. Raises
        NotFoundError if the node has no lease."""
        with self._file.connected() as connection, transaction(connection):
            if connection.execute("SELECT 1 FROM leases WHERE url = ?", (url,)).fetchone() is None:
                raise NotFoundError("No node is registered with this URL.")
            return _delete_lease(connection, url, is_proven)

    def addresses(self) -> list[NodeAddress]:
        """Return the nodes with a live lease; each limit is divided among the workers."""
        with self._file.connected() as connection:
            rows = connection.execute(
                "SELECT url, concurrency, is_proven FROM leases WHERE expires_at > ? AND boot = ?",
                (boot_time(), boot_id()),
            )
            addresses = [
                NodeAddress(
                    url, concurrency=limit or self.concurrency, gets_shared_key=bool(is_proven), is_registered=True
                )
                for url, limit, is_proven in rows
            ]
        return [address.of_worker(self.workers, self.worker) for address in addresses]

    @property
    def _file(self) -> SharedFile:
        return SharedFile(self.path, "for registered nodes", "keys", _BUSY_S)


def _delete_lease(connection: sqlite3.Connection, url: str, is_proven: bool) -> bool:
    """Delete the lease of `url`, unless it is proven and `is_proven` is not set. Return whether the lease is gone."""
    connection.execute("DELETE FROM leases WHERE url = ? AND is_proven <= ?", (url, is_proven))
    return connection.execute("SELECT 1 FROM leases WHERE url = ?", (url,)).fetchone() is None
