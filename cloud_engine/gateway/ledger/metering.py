"""One row per request in SQLite, written behind the requests' backs by a thread of its own."""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

from ....protocol.errors import ConfigurationError
from ....protocol.safety.private_files import private_file
from ....protocol.wal import use_wal

_MAX_BATCH = 1000
_RETRY_S = 1.0
_SQL_TYPES = {"str": "TEXT", "int": "INTEGER", "float": "REAL", "float | None": "REAL"}
_log = logging.getLogger("updraft.gateway")


@dataclass(slots=True)
class UsageRow:
    """What one request came to."""

    # The id in `x-request-id`.
    request_id: str
    # Whose key it was.
    key_name: str = ""
    # The model that was asked for.
    model: str = ""
    # The node that answered, or that was tried last.
    node: str = ""
    # HTTP status. 499: the client left. 502 also for a stream that its node cut, though the wire said 200.
    status: int = 0
    # Tokens of the prompt.
    prompt_tokens: int = 0
    # Tokens of the answer.
    completion_tokens: int = 0
    # Tokens of the prediction that the model confirmed.
    accepted_prediction_tokens: int = 0
    # Tokens of the prediction that it did not.
    rejected_prediction_tokens: int = 0
    # Milliseconds of the whole request.
    latency_ms: float = 0.0
    # Milliseconds until the first byte.
    ttft_ms: float | None = None
    # Nodes that were tried before.
    retries: int = 0
    # Bytes that were sent to the client.
    bytes: int = 0
    # When it came, in seconds since the epoch.
    started_at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class _Flush:
    done: threading.Event


class Meter:
    """Takes rows without waiting; they are on disk after `flush` or `close`. A failing disk is tried again."""

    def __init__(self, path: Path) -> None:
        """Open or create the database. Raises ConfigurationError."""
        self._path = path
        columns = ", ".join(f"{column.name} {_SQL_TYPES[str(column.type)]}" for column in fields(UsageRow))
        try:
            private_file(path)
            with self._connect() as connection:
                use_wal(connection)
                connection.execute(f"CREATE TABLE IF NOT EXISTS usage (id INTEGER PRIMARY KEY, {columns})")
            connection.close()
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(
                f"Cannot use {path} as the usage database: {error}. Choose another --db."
            ) from error
        self._queue: queue.SimpleQueue[UsageRow | _Flush | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="updraft-meter", daemon=True)
        self._thread.start()

    def record(self, row: UsageRow) -> None:
        self._queue.put(row)

    def flush(self) -> None:
        """Block until every row recorded before is committed."""
        done = threading.Event()
        self._queue.put(_Flush(done))
        done.wait()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def totals(self) -> list[dict[str, Any]]:
        """Sums by key name and model, everything recorded so far included."""
        self.flush()
        sums = (
            "prompt_tokens",
            "completion_tokens",
            "accepted_prediction_tokens",
            "rejected_prediction_tokens",
            "bytes",
        )
        connection = self._connect()
        try:
            connection.row_factory = sqlite3.Row
            cursor = connection.execute(
                f"SELECT key_name, model, COUNT(*) AS requests, SUM(status >= 400) AS errors, "
                f"{', '.join(f'SUM({name}) AS {name}' for name in sums)} FROM usage GROUP BY key_name, model"
            )
            return [dict(row) for row in cursor]
        finally:
            connection.close()

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=10)

    def _write(self) -> None:
        connection = self._connect()
        connection.execute("PRAGMA synchronous = NORMAL")
        open_for_more = True
        while open_for_more:
            batch = [self._queue.get()]
            while len(batch) < _MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get())
            open_for_more = None not in batch
            self._commit(connection, [astuple(item) for item in batch if isinstance(item, UsageRow)])
            for item in batch:
                if isinstance(item, _Flush):
                    item.done.set()
        connection.close()

    def _commit(self, connection: sqlite3.Connection, rows: list[tuple[Any, ...]]) -> None:
        names = ", ".join(column.name for column in fields(UsageRow))
        marks = ", ".join("?" for _ in fields(UsageRow))
        while rows:
            try:
                with connection:
                    connection.executemany(f"INSERT INTO usage ({names}) VALUES ({marks})", rows)
                return
            except sqlite3.Error as error:
                _log.error("Cannot write %d usage rows to %s, trying again: %s", len(rows), self._path, error)
                time.sleep(_RETRY_S)
