"""SQLite files shared by processes: write-ahead log, transactions, schema inspection, and connections per process."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..errors import ConfigurationError, StorageError
from .private_files import create_private, private_file

FORK_WAIT_S = 5.0
"""Time that a fork waits for threads using a database, in seconds."""
_BUSY_TIMEOUT_S, _PAUSE_S = 5.0, 0.01


class ForkAware(Protocol):
    """Resource that must be released before a fork."""

    def before_fork(self, timeout_s: float, /) -> bool:
        """Release the resource and lock out other threads. Returns False if it stays in use beyond `timeout_s`."""
        ...

    def after_fork(self, in_child: bool, /) -> None:
        """Allow other threads to use the resource again."""
        ...


class ForkGuard:
    """Registry of the fork-aware resources of a process."""

    def __init__(self) -> None:
        #: Reason why this process must not open a database; empty if opening is safe.
        self.problem = ""
        self._resources = weakref.WeakSet[ForkAware]()
        self._lock = threading.Lock()
        self._held: list[ForkAware] = []
        self._busy: list[ForkAware] = []  # kept alive in a child, because destroying a resource uses the database
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before,
                after_in_parent=lambda: self._after(in_child=False),
                after_in_child=lambda: self._after(in_child=True),
            )

    def add(self, resource: ForkAware) -> None:
        """Register `resource` until it is garbage-collected. Blocks during a fork."""
        with self._lock:
            self._resources.add(resource)

    def _before(self) -> None:
        self._lock.acquire()
        until = time.monotonic() + FORK_WAIT_S
        self._busy = []
        for resource in list(self._resources):
            paused = resource.before_fork(max(0.0, until - time.monotonic()))
            (self._held if paused else self._busy).append(resource)

    def _after(self, *, in_child: bool) -> None:
        held, self._held = self._held, []
        for resource in held:
            resource.after_fork(in_child)
        if not in_child:
            self._busy = []
        elif self._busy:
            self.problem = (
                f"a thread of the parent process used a database for more than {FORK_WAIT_S:.0f} s during os.fork();"
                " fork before the first request, or start child processes with multiprocessing's spawn"
            )
        self._lock.release()


FORKS = ForkGuard()  # one per process, because `os.fork()` affects all databases


def use_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to WAL mode, in which commits survive a crash of the process. SQLite's busy timeout does not
    apply to the switch: a new file is "locked" at once while another connection switches. This function retries for up
    to 5 seconds. Raises sqlite3.OperationalError."""
    until = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(_PAUSE_S)
    connection.execute("PRAGMA synchronous=NORMAL")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Generator[sqlite3.Connection]:
    """Run the block in a transaction that excludes other writers; roll back if the block raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # on a full disk, SQLite has already rolled back
            connection.execute("ROLLBACK")
        raise


def create_tables(connection: sqlite3.Connection, schema: Iterable[str]) -> None:
    """Execute the statements of `schema` in one transaction, so that several processes may open a new file at once."""
    with transaction(connection):
        for statement in schema:
            connection.execute(statement)


def tables(connection: sqlite3.Connection) -> frozenset[str]:
    return frozenset(name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'"))


def columns(connection: sqlite3.Connection, table: str) -> tuple[str, ...]:
    """Return the names of the columns of `table`, in order."""
    return tuple(name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,)))


@dataclass(frozen=True, slots=True)
class SharedFile:
    """SQLite file, usable from any thread. Methods raise StorageError naming `param`, and the errors of `prepare`."""

    path: Path
    # Purpose in error messages, such as "as the key database".
    purpose: str
    # Setting that holds the path, for error messages.
    param: str | None
    # Time to wait for other writers, in seconds.
    busy_s: float = 5.0

    def open(self, prepare: Callable[[sqlite3.Connection], object], *, read_only: bool = False) -> sqlite3.Connection:
        """Open the file, or create it unless `read_only`, and run `prepare`, which checks it and creates tables."""
        try:
            if not read_only:
                create_private(self.path)
            with ExitStack() as undo:
                connection = self._connect("ro" if read_only else "rw")
                undo.callback(connection.close)
                prepare(connection)
                if not read_only:
                    private_file(self.path)
                    use_wal(connection)
                undo.pop_all()
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error
        return connection

    def create(self, schema: Iterable[str]) -> None:
        """Create the file and its tables if missing."""
        self.open(lambda connection: create_tables(connection, schema)).close()

    @contextmanager
    def connected(self) -> Generator[sqlite3.Connection]:
        """Open a temporary connection to a file made by `create`."""
        try:
            with closing(self._connect("rwc")) as connection:
                yield connection
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _connect(self, mode: str) -> sqlite3.Connection:
        if self.path.is_file() and self.path.stat().st_size == 1:  # SQLite treats a one-byte file as new
            error = sqlite3.DatabaseError("file is not a database")
            error.sqlite_errorcode = sqlite3.SQLITE_NOTADB
            raise error
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        return sqlite3.connect(uri, uri=True, timeout=self.busy_s, isolation_level=None, check_same_thread=False)

    def _unusable(self, error: Exception) -> StorageError:
        return StorageError(
            f"Cannot use {self.path} {self.purpose}: {error}. Choose another file, or move this one.", param=self.param
        )


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
