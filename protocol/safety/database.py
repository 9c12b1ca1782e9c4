"""SQLite database with one connection per process, shared by threads and closed across forks."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigurationError
from ..sqlite import transaction
from .forks import FORKS
from .shared_file import SharedFile


class Database:
    """Connection to `file`, which is opened again after a fork. `prepare` is called with each new connection. `busy_s`
    replaces `file.busy_s` once the database is open. `read_only`: neither change nor create files. The constructor
    raises ConfigurationError if the file is unusable."""

    def __init__(
        self,
        file: SharedFile,
        prepare: Callable[[sqlite3.Connection], object],
        *,
        busy_s: float | None = None,
        read_only: bool = False,
    ) -> None:
        self._file = file
        self._prepare = prepare
        self._busy_s = file.busy_s if busy_s is None else busy_s
        self._read_only = read_only
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._identities: dict[Path, tuple[int, int]] = {}  # device and inode of the open files
        self._is_closed = False
        FORKS.add(self)
        with self._lock:
            self._open()

    @contextmanager
    def use(self) -> Generator[sqlite3.Connection]:
        """Lend the connection to this thread. Read all results within the block. Raises sqlite3.Error."""
        if FORKS.problem:  # the lock may be held by a thread that no longer exists in this child
            raise sqlite3.OperationalError(FORKS.problem)
        with self._lock:
            if self._is_closed:
                raise sqlite3.ProgrammingError(f"{self._file.path} is closed")
            try:
                connection = self._connection or self._open()
            except ConfigurationError as error:
                raise sqlite3.OperationalError(error.message) from error
            yield connection

    @contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        """Run the block in a transaction that excludes writers in all threads and processes. Raises sqlite3.Error."""
        with self.use() as connection, transaction(connection):
            yield connection

    def displaced(self) -> Path | None:
        """Return a database file that was moved, replaced, deleted or emptied while open; None if all are in place."""
        known, path = self._identities, self._file.path
        for each in (path, path.with_name(f"{path.name}-wal")) if known else ():
            identity = _identity(each)
            if each in known and identity != known[each]:
                return each
            if identity is not None:  # the WAL file may appear later, at the first read
                known[each] = identity
        return None

    def close(self) -> None:
        if not FORKS.problem:
            with self._lock:
                self._is_closed = True
                self._disconnect()

    def before_fork(self, timeout_s: float, /) -> bool:
        if not self._lock.acquire(timeout=timeout_s):
            return False
        self._disconnect()
        return True

    def after_fork(self, _: bool, /) -> None:
        self._lock.release()

    def _open(self) -> sqlite3.Connection:
        if FORKS.problem:
            raise ConfigurationError(f"Cannot use {self._file.path} {self._file.purpose}: {FORKS.problem}.")
        connection = self._file.open(self._prepare, read_only=self._read_only)
        connection.execute(f"PRAGMA busy_timeout={round(self._busy_s * 1000)}")
        if (identity := _identity(self._file.path)) is not None:
            self._identities = {self._file.path: identity}
        self._connection = connection
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._identities = None, {}


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the file's device and inode; None if the file is missing or an empty database."""
    try:
        stats = path.stat()
    except OSError:
        return None
    is_log = path.name.endswith("-wal")  # a WAL file may be empty after a checkpoint
    return (stats.st_dev, stats.st_ino) if stats.st_size or is_log else None
