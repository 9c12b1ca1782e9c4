"""Ledger queries for SQLite and PostgreSQL: sums by group, whole rows, and spent dollars."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from .table import LedgerTable

_COUNTS = {"requests": "COUNT(*)", "errors": "COALESCE(SUM(CASE WHEN status >= 400 THEN 1 ELSE 0 END), 0)"}


@dataclass(frozen=True, slots=True)
class LedgerReader:
    """Queries over one ledger. Methods raise the errors of `connect` and of the database driver."""

    table: LedgerTable
    # Opens a connection or a cursor.
    connect: Callable[[], AbstractContextManager[Any]]
    placeholder: str = "?"
    # SQL expression for the day (UTC) of a row, as text.
    day_sql: str = "date(started_at, 'unixepoch')"
    # Column that orders rows with equal times.
    rowid: str = "rowid"

    def totals(self, by: Sequence[str] = (), since: float = 0.0) -> list[dict[str, Any]]:
        """Return sums over the rows since `since`, grouped by the names in `by`: keys of `table.groups`, or `day`."""
        table = self.table
        groups = {name: self.day_sql if name == "day" else table.groups[name] for name in by}
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
        """Return the rows since `since` whose columns have the values in `equal`, oldest first.

        `newest`: return only the latest rows, at most this many, newest first.
        """
        where = "".join(f" AND {name} = ?" for name, _ in equal)
        order = f"started_at, {self.rowid}" if newest is None else f"started_at DESC, {self.rowid} DESC LIMIT {newest}"
        columns = ", ".join(self.table.columns)
        query = f"SELECT {columns} FROM {self.table.name} WHERE started_at >= ?{where} ORDER BY {order}"
        return self._select(query, [since, *(value for _, value in equal)])

    def spent(self, column: str, value: str, since: float) -> float:
        """Return the total cost, in US dollars, of the rows since `since` whose `column` is `value`."""
        spent = f"SELECT COALESCE(SUM(cost_usd), 0.0) AS usd FROM {self.table.name}"
        with self._select(f"{spent} WHERE {column} = ? AND started_at >= ?", [value, since]) as rows:
            return next(rows)["usd"]

    @contextmanager
    def _select(self, query: str, values: Sequence[object]) -> Generator[Iterator[dict[str, Any]]]:
        with self.connect() as connection:
            cursor = connection.execute(query.replace("?", self.placeholder), values)
            names = [about[0] for about in cursor.description]
            yield (dict(zip(names, row, strict=True)) for row in cursor)
