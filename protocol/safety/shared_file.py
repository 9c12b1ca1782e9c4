"""A SQLite file of the user's alone, which several processes read and write."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigurationError, StorageError
from ..wal import create_tables, use_wal
from .private_files import create_private, private_file


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Any thread may use it. Its methods raise StorageError, which names `param`, and what `prepare` raises."""

    path: Path
    # What it is for, as in "as the key database".
    purpose: str
    # The setting that says where it is.
    param: str | None
    # Seconds to wait for other writers.
    busy_s: float = 5.0

    def open(self, prepare: Callable[[sqlite3.Connection], object], *, read_only: bool = False) -> sqlite3.Connection:
        """A connection after `prepare`, which checks the file and makes its tables. A missing file is made.

        `read_only`: change nothing, make no file.
        """
        try:
            if not read_only:
                create_private(self.path)
            connection = self._connect("ro" if read_only else "rw")
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error
        try:
            prepare(connection)
            if not read_only:
                private_file(self.path)
                use_wal(connection)
        except (OSError, sqlite3.Error) as error:
            connection.close()
            raise self._unusable(error) from error
        except ConfigurationError:
            connection.close()
            raise
        return connection

    def create(self, schema: Iterable[str]) -> None:
        """Make the file and its tables, if there are none."""
        self.open(lambda connection: create_tables(connection, schema)).close()

    @contextmanager
    def connected(self) -> Generator[sqlite3.Connection]:
        """A connection to the file that `create` has made."""
        try:
            with closing(self._connect("rwc")) as connection:
                yield connection
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _connect(self, mode: str) -> sqlite3.Connection:
        if self.path.is_file() and self.path.stat().st_size == 1:  # which SQLite takes for a new database
            error = sqlite3.DatabaseError("file is not a database")
            error.sqlite_errorcode = sqlite3.SQLITE_NOTADB
            raise error
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        return sqlite3.connect(uri, uri=True, timeout=self.busy_s, isolation_level=None, check_same_thread=False)

    def _unusable(self, error: Exception) -> StorageError:
        return StorageError(
            f"Cannot use {self.path} {self.purpose}: {error}. Name another file, or move it away.", param=self.param
        )
