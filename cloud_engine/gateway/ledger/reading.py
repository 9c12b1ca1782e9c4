"""Reads the gateway's ledger: sums by key, model or day, whole rows, and what budgets have spent."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Literal

from ....protocol.errors import ConfigurationError
from .metering import COLUMNS

Group = Literal["key", "tenant", "model", "day", "node", "tier"]

_READ_S = 2.0
_FIRST_DAY = date(1970, 1, 1)
_COLUMNS: dict[Group, str] = {
    "key": "key_name",
    "tenant": "tenant",
    "model": "model",
    "node": "node",
    "tier": "tier",
}
_SUMS = (
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "accepted_prediction_tokens",
    "rejected_prediction_tokens",
    "bytes",
)
_TOTALS = (
    "COUNT(*) AS requests, SUM(CASE WHEN status >= 400 THEN 1 ELSE 0 END) AS errors, "
    "SUM(CASE WHEN state = 'abandoned' THEN 1 ELSE 0 END) AS abandoned, "
    "SUM(CASE WHEN cost_usd IS NULL AND status < 400 AND state = 'settled' THEN 1 ELSE 0 END) AS unpriced, "
    f"{', '.join(f'SUM({name}) AS {name}' for name in _SUMS)}, COALESCE(SUM(cost_usd), 0.0) AS cost_usd"
)


@contextmanager
def _select(file: str, query: str, values: Sequence[object]) -> Iterator[Iterator[dict[str, Any]]]:
    """The rows of a query to a SQLite file, as dictionaries. Raises ConfigurationError."""
    try:
        uri = f"{Path(file).absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=_READ_S)) as connection:
            connection.row_factory = sqlite3.Row
            yield (dict(row) for row in connection.execute(query, values))
    except sqlite3.Error as error:
        raise ConfigurationError(f"The usage database {file} cannot be read: {error}.") from error


@dataclass(frozen=True, slots=True)
class UsageReader:
    """Each call has a connection of its own, and locks out no writer."""

    # A file, or a URL.
    database: str
    # The rows of a query to it.
    select: Callable[[str, str, Sequence[object]], AbstractContextManager[Iterator[dict[str, Any]]]] = _select
    # The day of a row, in days since 1970.
    day: str = "CAST(started_at / 86400 AS INTEGER)"

    def totals(self, by: Sequence[Group], since: float = 0.0) -> list[dict[str, Any]]:
        """Over the rows that began from `since` on, a group for each combination of what `by` names."""
        groups = [(self.day, "day") if name == "day" else (_COLUMNS[name],) * 2 for name in by]
        columns = "".join(f"{column} AS {name}, " for column, name in groups)
        numbers = ", ".join(str(number) for number in range(1, len(by) + 1))
        grouped = f" GROUP BY {numbers} ORDER BY {numbers}" if by else ""
        query = f"SELECT {columns}{_TOTALS} FROM usage WHERE started_at >= ? AND state <> 'intent'{grouped}"
        with self._rows(query, since) as found:
            return [
                each | {"day": str(_FIRST_DAY + timedelta(each["day"]))} if "day" in each else each for each in found
            ]

    @contextmanager
    def rows(self, since: float = 0.0) -> Iterator[Iterator[dict[str, Any]]]:
        """All that began from `since` on, oldest first."""
        with self._rows(f"SELECT {', '.join(COLUMNS)} FROM usage WHERE started_at >= ? ORDER BY id", since) as found:
            yield found

    def spent(self, column: Literal["key_id", "tenant", "model"], value: str, since: float) -> float:
        """US dollars of the rows with `value` in `column` that began from `since` on."""
        query = f"SELECT COALESCE(SUM(cost_usd), 0.0) AS usd FROM usage WHERE {column} = ? AND started_at >= ?"
        with self._rows(query, value, since) as found:
            return next(found)["usd"]

    def _rows(self, query: str, *values: object) -> AbstractContextManager[Iterator[dict[str, Any]]]:
        return self.select(self.database, query, values)
