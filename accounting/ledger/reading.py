"""Reads a ledger: sums by group, whole rows, and spent dollars; from SQLite and PostgreSQL alike."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from .table import LedgerTable

_COUNTS = {"requests": "COUNT(*)", "errors": "COALESCE(SUM(CASE WHEN status >= 400 THEN 1 ELSE 0 END), 0)"}


@dataclass(frozen=True, slots=True)
class LedgerReader:
    """Raises what `connect` raises, and errors of the connection."""

    table: LedgerTable
    # Opens a connection, or a cursor of one.
    connect: Callable[[], AbstractContextManager[Any]]
    # The mark of a value in a query.
    mark: str = "?"
    # The day of a row (UTC), as text.
    day: str = "date(started_at, 'unixepoch')"
    # The column that orders rows of the same time.
    tie: str = "rowid"

    def totals(self, by: Sequence[str] = (), since: float = 0.0) -> list[dict[str, Any]]:
        """Sums over the rows that began from `since` on, for each combination of `by`: table's groups, `day`."""
        table = self.table
        groups = {name: self.day if name == "day" else table.groups[name] for name in by}
        named = {text if text.isidentifier() else name: text for name, text in groups.items()}
        columns = ", ".join(f"{text} AS {name}" for name, text in {**named, **_COUNTS, **table.sums}.items())
        pending = "" if table.state is None else f" AND {table.state} <> 'intent'"
        numbers = ", ".join(str(number + 1) for number in range(len(by)))
        grouped = f" GROUP BY {numbers} ORDER BY {numbers}" if by else ""
        query = f"SELECT {columns} FROM {table.name} WHERE started_at >= ?{pending}{grouped}"
        with self._select(query, [since]) as rows:
            return list(rows)

    def rows(
        self, since: float = 0.0, *, equal: Sequence[tuple[str, str]] = (), newest: int | None = None
    ) -> AbstractContextManager[Iterator[dict[str, Any]]]:
        """The rows that began from `since` on and have the values `equal`, oldest first.

        `newest`: only this many, and the newest first.
        """
        where = "".join(f" AND {name} = ?" for name, _ in equal)
        order = f"started_at, {self.tie}" if newest is None else f"started_at DESC, {self.tie} DESC LIMIT {newest}"
        columns = ", ".join(self.table.columns)
        query = f"SELECT {columns} FROM {self.table.name} WHERE started_at >= ?{where} ORDER BY {order}"
        return self._select(query, [since, *(value for _, value in equal)])

    def spent(self, column: str, value: str, since: float) -> float:
        """US dollars of the rows with `value` in `column` that began from `since` on."""
        spent = f"SELECT COALESCE(SUM(cost_usd), 0.0) AS usd FROM {self.table.name}"
        with self._select(f"{spent} WHERE {column} = ? AND started_at >= ?", [value, since]) as rows:
            return next(rows)["usd"]

    @contextmanager
    def _select(self, query: str, values: Sequence[object]) -> Generator[Iterator[dict[str, Any]]]:
        with self.connect() as connection:
            cursor = connection.execute(query.replace("?", self.mark), values)
            names = [about[0] for about in cursor.description]
            yield (dict(zip(names, row, strict=True)) for row in cursor)
