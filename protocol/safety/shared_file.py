"""A SQLite file of the user's alone, which several processes read and write."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigurationError
from ..wal import use_wal
from .private_files import private_file


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Any thread may use it. Its methods raise ConfigurationError, which names `param`."""

    path: Path
    # What it is for, as in "as the key database".
    purpose: str
    # The setting that says where it is.
    param: str
    # Seconds to wait for other writers.
    busy_s: float

    def create(self, schema: str) -> None:
        """Make the file and its tables, if there are none."""
        try:
            private_file(self.path)
        except OSError as error:
            raise self._unusable(error) from error
        with self.connected() as connection:
            use_wal(connection)
            connection.executescript(f"BEGIN IMMEDIATE; {schema}; COMMIT;")

    @contextmanager
    def connected(self) -> Generator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=self.busy_s, isolation_level=None)) as connection:
                yield connection
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> ConfigurationError:
        return ConfigurationError(f"Cannot use {self.path} {self.purpose}: {error}.", param=self.param)
