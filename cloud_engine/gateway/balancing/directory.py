"""The nodes that have registered, in a small file beside the key database that all workers read."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from ....protocol.errors import OverloadedError
from ....protocol.safety.shared_file import SharedFile
from ....protocol.safety.system import boot_id, boot_time
from ....protocol.wal import transaction
from .node import NodeAddress

LEASE_S = 10.0  # a node that sends no heartbeat for so long is gone
_MAX_NODES = 1024
_BUSY_S = 2.0
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS leases (
      url TEXT PRIMARY KEY, concurrency INTEGER, is_proven INTEGER NOT NULL,
      boot TEXT NOT NULL, expires_at REAL NOT NULL) WITHOUT ROWID""",
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

    def register(self, url: str, concurrency: int | None, *, is_proven: bool) -> None:
        """Keep a node for the length of a lease, by `boot_time`. Raises OverloadedError if there are too many.

        `is_proven`: whether the node has proved that it knows the key of all nodes. A proven lease stays as it is until
        it expires, unless a proof renews it: anybody may have the key to register, and the name of another node.
        """
        now, boot = boot_time(), boot_id()
        with self._file.connected() as connection, transaction(connection):
            connection.execute("DELETE FROM leases WHERE expires_at <= ? OR boot <> ?", (now, boot))
            if not _given_up(connection, url, is_proven):
                return
            (count,) = connection.execute("SELECT count(*) FROM leases").fetchone()
            if count >= _MAX_NODES:
                raise OverloadedError(f"{_MAX_NODES} nodes are registered, and more are not taken.")
            row = url, concurrency, is_proven, boot, now + LEASE_S
            connection.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?)", row)

    def remove(self, url: str, *, is_proven: bool) -> bool:
        """Drop the lease of a node. A proven lease stays without a proof: return False."""
        with self._file.connected() as connection, transaction(connection):
            return _given_up(connection, url, is_proven)

    def addresses(self) -> list[NodeAddress]:
        """The nodes whose lease lasts, with one worker's share of what they take."""
        with self._file.connected() as connection:
            rows = connection.execute(
                "SELECT url, concurrency, is_proven FROM leases WHERE expires_at > ? AND boot = ?",
                (boot_time(), boot_id()),
            )
            found = [
                NodeAddress(
                    url, concurrency=limit or self.concurrency, gets_shared_key=bool(is_proven), is_registered=True
                )
                for url, limit, is_proven in rows
            ]
        return [address.of_worker(self.workers, self.worker) for address in found]

    @property
    def _file(self) -> SharedFile:
        return SharedFile(self.path, "for registered nodes", "keys", _BUSY_S)


def _given_up(connection: sqlite3.Connection, url: str, is_proven: bool) -> bool:
    """Delete the lease of `url`, unless the lease is proven and the caller is not; whether it is gone."""
    connection.execute("DELETE FROM leases WHERE url = ? AND is_proven <= ?", (url, is_proven))
    return connection.execute("SELECT 1 FROM leases WHERE url = ?", (url,)).fetchone() is None
