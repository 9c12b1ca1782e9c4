"""The description of a ledger: the columns that all rows share, and tables made from row types."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from typing import Any

import msgspec

Values = tuple[Any, ...]
"""One row, in the order of the table's columns."""

SETTLED = "settled"
_TYPES = {"int": ("INTEGER", "bigint"), "float": ("REAL", "double precision")}
_TEXT = ("TEXT", "text")


@dataclass(slots=True)
class RequestRow:
    """The columns of every ledger. Rows of older files get the defaults for columns that came later."""

    # The request's id, as in the answer.
    id: str
    # Start of the request, in seconds since the epoch.
    started_at: float = field(default_factory=time.time)
    # The model that the caller named.
    model: str = ""
    # HTTP status, also of a failure after the first bytes of a stream. 499: the caller went away.
    status: int = 0
    # Prompt tokens that the model's server had in its cache.
    cached_tokens: int = 0
    # US dollars, by the prices of that moment. NULL: a model that was asked has no price.
    cost_usd: float | None = None
    # Milliseconds until the answer was complete.
    latency_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a column for each field of a dataclass."""

    name: str
    row: type[Any]
    # Columns of the primary key.
    key: str = "id"
    # As in `CREATE INDEX`, from the index's name on.
    indexes: tuple[str, ...] = ()
    # Former names of columns, which SQL may still use.
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    # By format: SQL expressions that make columns out of a row of any format before that.
    upgrades: Mapping[int, Mapping[str, str]] = field(default_factory=dict[int, Mapping[str, str]])

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(each.name for each in fields(self.row))

    def types(self, *, postgres: bool = False) -> dict[str, str]:
        """The columns' types in SQL."""
        names = {each.name: str(each.type).partition(" | None") for each in fields(self.row)}
        return {
            name: _TYPES.get(kind, _TEXT)[postgres] + ("" if null else " NOT NULL")
            for name, (kind, null, _) in names.items()
        }

    def create(self, *, postgres: bool = False) -> list[str]:
        """The statements that make the table, and then its indexes."""
        columns = [f"{name} {kind}" for name, kind in self.types(postgres=postgres).items()]
        if not postgres:
            columns += [f"{old} ANY AS ({name})" for old, name in self.aliases.items()]
        strict = "" if postgres else " STRICT"
        return [
            f"CREATE TABLE IF NOT EXISTS {self.name} ({', '.join(columns)}, PRIMARY KEY ({self.key})){strict}",
            *(f"CREATE INDEX IF NOT EXISTS {each}" for each in self.indexes),
        ]

    def selection(self, found: Container[str], file_format: int) -> str:
        """The columns as expressions over a table of an older format, which has the columns `found`."""
        made: dict[str, str] = {}
        for before, expressions in self.upgrades.items():
            made |= expressions if file_format < before else {}
        columns: list[str] = []
        for each in fields(self.row):
            value = made.get(each.name, each.name if each.name in found else "NULL")
            default = "NULL" if each.default in (None, MISSING) else repr(each.default)
            columns.append(f"coalesce({value}, {default}) AS {each.name}")
        return ", ".join(columns)


@dataclass(frozen=True, kw_only=True)
class LedgerTable(Table):
    """The table with a row per request, and its file."""

    # The number of this format. Files of older formats are migrated, newer ones are refused.
    format: int
    # The file's name in messages.
    purpose: str
    # The setting that names the file.
    param: str
    # Other tables of the file.
    others: tuple[Table, ...] = ()
    # By format: the order of columns in records that an older process left.
    records: Mapping[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    # What sums can be grouped by, beside the day: SQL expressions by name.
    groups: Mapping[str, str]
    # Sums of a group, beside `requests` and `errors`: SQL expressions by name.
    sums: Mapping[str, str]
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

    @cached_property
    def values_of(self) -> Callable[[Any], Values]:
        """Returns the values of a row, in the order of the columns."""
        return attrgetter(*self.columns)

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

    @cached_property
    def record_of(self) -> Callable[[Values], bytes]:
        """Returns a row as bytes, with its format's number. Raises UnicodeError for text that no database takes."""
        file_format, encode = self.format, msgspec.json.encode
        return lambda values: encode((file_format, values))

    def values_in(self, record: bytes) -> Values:
        """The row of which `record_of` made the record, in an older format too. Raises ValueError for anything else."""
        try:
            file_format, values = msgspec.json.decode(record, type=tuple[int, Values])
        except msgspec.ValidationError:  # older records are rows alone
            file_format, values = 0, msgspec.json.decode(record, type=Values)
        names = self.columns if file_format == self.format else self.records.get(file_format, ())
        if len(values) != len(names):
            raise ValueError("a row with other columns")
        found = dict(zip(names, values, strict=True))
        return tuple(found.get(each.name, each.default) for each in fields(self.row))
