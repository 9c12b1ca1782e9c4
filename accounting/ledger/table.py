"""The schema of a ledger: columns common to all rows, and tables generated from row classes."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from ...protocol.decoding import prepare_types

Values = tuple[Any, ...]
"""One row's values, in column order."""

SETTLED = "settled"

NOT_STORED = {"is_stored": False}
"""Metadata of a row's field that is no column."""


class BookedRow(NamedTuple):
    """A row with its bookings: the changes of a side table that are committed together with the row, exactly once."""

    values: Values
    # Parameters of `LedgerTable.booking`, once for each change.
    bookings: tuple[Values, ...] = ()


class _Record(NamedTuple):
    """A row in an intent file. Records of earlier versions have no bookings."""

    file_format: int
    values: Values
    bookings: tuple[Values, ...] = ()


prepare_types(_Record)

_TYPES = {"int": ("INTEGER", "bigint"), "float": ("REAL", "double precision")}
_TEXT = ("TEXT", "text")


@dataclass(slots=True)
class RequestRow:
    """The columns of every ledger. Rows of older files get the defaults of newer columns."""

    # Id of the request, as in its response.
    id: str
    # Start of the request, in seconds since the epoch.
    started_at: float = field(default_factory=time.time)
    # Name of the model that the caller asked for.
    model: str = ""
    # HTTP status, also of failures after the first bytes of a stream. 499: the caller disconnected.
    status: int = 0
    # Prompt tokens that the model's server had cached.
    cached_tokens: int = 0
    # Cost in US dollars, by the prices at that time. NULL: a called model has no price.
    cost_usd: float | None = None
    # Time until the answer was complete, in milliseconds.
    latency_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with one column per field of a dataclass, except fields that are `NOT_STORED`."""

    name: str
    row: type[Any]
    # Primary key, as comma-separated columns.
    key: str = "id"
    # Index definitions: the part of `CREATE INDEX` from the name on.
    indexes: tuple[str, ...] = ()
    # Current name of each renamed column, keyed by the former name, which SQL queries may still use.
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    # For each format number: the columns that the format changed, with SQL expressions over rows of earlier formats.
    upgrades: Mapping[int, Mapping[str, str]] = field(default_factory=dict[int, Mapping[str, str]])

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.stored)

    @cached_property
    def stored(self) -> tuple[Field[Any], ...]:
        """The row's fields with a column."""
        return tuple(each for each in fields(self.row) if each.metadata.get("is_stored", True))

    def types(self, *, postgres: bool = False) -> dict[str, str]:
        """Return the columns' SQL types."""
        names = {each.name: str(each.type).partition(" | None") for each in self.stored}
        return {
            name: _TYPES.get(kind, _TEXT)[postgres] + ("" if null else " NOT NULL")
            for name, (kind, null, _) in names.items()
        }

    def create(self, *, postgres: bool = False) -> list[str]:
        """Return the statements that create the table and its indexes."""
        columns = [f"{name} {kind}" for name, kind in self.types(postgres=postgres).items()]
        if not postgres:
            columns += [f"{old} ANY AS ({name})" for old, name in self.aliases.items()]
        strict = "" if postgres else " STRICT"
        return [
            f"CREATE TABLE IF NOT EXISTS {self.name} ({', '.join(columns)}, PRIMARY KEY ({self.key})){strict}",
            *(f"CREATE INDEX IF NOT EXISTS {each}" for each in self.indexes),
        ]

    def selection(self, existing: Container[str], file_format: int) -> str:
        """Return SQL expressions that compute all columns from an older table, which has the columns `existing`."""
        made: dict[str, str] = {}
        for before, expressions in self.upgrades.items():
            made |= expressions if file_format < before else {}
        columns: list[str] = []
        for each in self.stored:
            value = made.get(each.name, each.name if each.name in existing else "NULL")
            default = "NULL" if each.default in (None, MISSING) else repr(each.default)
            columns.append(f"coalesce({value}, {default}) AS {each.name}")
        return ", ".join(columns)


@dataclass(frozen=True, kw_only=True)
class LedgerTable(Table):
    """The main table of a ledger file, with one row per request, and the settings of the file."""

    # Current format number. Older files are migrated; newer files are refused.
    format: int
    # Description of the file in messages, such as "ledger".
    purpose: str
    # Setting that names the file.
    param: str
    side_tables: tuple[Table, ...] = ()
    # SQL statement that books a row's amounts in a side table.
    booking: str = ""
    # Column order in the intent records of each older format, by format number.
    records: Mapping[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    # SQL expressions by which sums can be grouped, keyed by name. Grouping by day is always possible.
    groups: Mapping[str, str]
    # SQL aggregates to compute in addition to `requests` and `errors`, keyed by name.
    sums: Mapping[str, str]
    # Maximum time that a commit waits for other processes, in seconds.
    busy_s: float = 2.0
    # Column with the row's state (intent, abandoned or settled). None: every row is settled.
    state: str | None = None
    # Columns that keep their values when a row is settled.
    fixed: frozenset[str] = frozenset()
    # Number of slots in each process's intent file.
    places: int = 4096
    # Size of a slot, in bytes.
    place_bytes: int = 1024
    # Maximum number of writing processes.
    max_workers: int = 32

    @cached_property
    def values_of(self) -> Callable[[Any], Values]:
        """Function that returns a row's values in column order."""
        return attrgetter(*self.columns)

    def insert(self, mark: str, *, settle: bool) -> str:
        """Return the statement that inserts a row. `settle`: overwrite an existing row, unless that row is settled."""
        marks, names = ", ".join(mark for _ in self.columns), ", ".join(self.columns)
        action = "NOTHING"
        if settle and self.state is not None:
            updates = ", ".join(f"{name} = excluded.{name}" for name in self.columns if name not in self.fixed)
            action = f"UPDATE SET {updates} WHERE {self.name}.{self.state} <> '{SETTLED}'"
        return f"INSERT INTO {self.name} ({names}) VALUES ({marks}) ON CONFLICT (id) DO {action}"

    def is_settled(self, values: Values) -> bool:
        return self.state is None or values[self.columns.index(self.state)] == SETTLED

    def record_of(self, row: BookedRow) -> bytes:
        """Encode a row with its format number. Raises UnicodeError for text that no database accepts."""
        return msgspec.json.encode(_Record(self.format, *row))

    def row_in(self, record: bytes) -> BookedRow:
        """Decode a record made by `record_of`, of this or an older format. Raises ValueError for other data."""
        try:
            file_format, values, bookings = msgspec.json.decode(record, type=_Record)
        except msgspec.ValidationError:  # records before format numbers are bare rows
            file_format, values, bookings = _Record(0, msgspec.json.decode(record, type=Values))
        names = self.columns if file_format == self.format else self.records.get(file_format, ())
        if len(values) != len(names):
            raise ValueError("the row's number of columns does not match its format")
        known = dict(zip(names, values, strict=True))
        return BookedRow(tuple(known.get(each.name, each.default) for each in self.stored), bookings)
