"""The description of a ledger's table: its columns, its statements, and how a row is kept until the commit."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

Values = tuple[Any, ...]
"""One row, in the order of the table's columns."""

SETTLED = "settled"


@dataclass(frozen=True, slots=True)
class LedgerTable:
    """One table with a row per request. Its primary key is `id`."""

    name: str
    # Names, in order.
    columns: tuple[str, ...]
    # The column with the start of the request, in seconds since the epoch.
    time: str
    # Create or migrate the table in the SQLite file at the path. Raises ConfigurationError.
    prepare: Callable[[sqlite3.Connection, Path], object]
    # The use of the file in messages, as in "as the ledger".
    purpose: str
    # The setting that names the file.
    param: str
    # Seconds that a commit waits for other processes.
    busy_s: float = 2.0
    # The column with `settled` or another state. None: every row is settled.
    state: str | None = None
    # Columns that never change after the intent of a request.
    fixed: frozenset[str] = frozenset()
    # Requests of one process that a kill at any moment leaves to the next process.
    places: int = 4096
    # Bytes of one of them.
    place_bytes: int = 1024
    # Processes that may write at once.
    max_workers: int = 32

    def insert(self, mark: str, *, settle: bool) -> str:
        """The statement for one row. A settled row stays as it is."""
        marks, names = ", ".join(mark for _ in self.columns), ", ".join(self.columns)
        action = "NOTHING"
        if settle and self.state is not None:
            updates = ", ".join(f"{name} = excluded.{name}" for name in self.columns if name not in self.fixed)
            action = f"UPDATE SET {updates} WHERE {self.name}.{self.state} <> '{SETTLED}'"
        return f"INSERT INTO {self.name} ({names}) VALUES ({marks}) ON CONFLICT (id) DO {action}"

    def is_settled(self, values: Values) -> bool:
        return self.state is None or values[self.columns.index(self.state)] == SETTLED

    def values_in(self, record: bytes) -> Values:
        """The row of which `record_of` made the record. Raises ValueError for anything else."""
        values = msgspec.json.decode(record, type=Values)
        if len(values) != len(self.columns):
            raise ValueError("a row with other columns")
        return values


def record_of(values: Values) -> bytes:
    """The row as bytes. Raises UnicodeError for text that no database takes."""
    return msgspec.json.encode(values)
