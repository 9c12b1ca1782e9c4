"""SQLite file accessible to the user only, and shared by several processes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import StorageError
from ..sqlite import create_tables, use_wal
from .private_files import create_private, private_file


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
