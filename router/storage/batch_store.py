"""Store of batches: their state in OpenAI's format, and the files they read and write."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ...protocol.decoding import prepare_types
from ...protocol.errors import InvalidRequestError, RateLimitError
from .answer_store import Page, only
from .file_store import FileMetadata, FilesDatabase, complete_file

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
MAX_ACTIVE = 100  # maximum number of waiting or running batches
_MAX_KEPT = 10_000  # maximum number of finished batches
_COLUMNS = "owner, output_id, error_id, outputs_expire_s, body"


class BatchError(msgspec.Struct):
    """A fault in the input file."""

    code: str
    message: str
    # Line number, from 1.
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """A batch as OpenAI describes it. Times are seconds since the epoch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    @property
    def is_over(self) -> bool:
        return self.status in ("failed", "completed", "expired", "cancelled")

    @property
    def files(self) -> list[str]:
        """IDs of the input file and of the output files."""
        return [self.input_file_id, *filter(None, (self.output_file_id, self.error_file_id))]

    def set_status(self, status: Status) -> None:
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A batch with the fields that only the router knows."""

    # Digest of the key that created the batch.
    owner: str
    # IDs of the output files for answers and for errors. None: the batch has not begun.
    output_id: str | None
    error_id: str | None
    # Seconds to keep the output files. None: for ever.
    outputs_expire_s: int | None
    batch: Batch


class BatchStore:
    """Store of batches. A batch is visible only to its owner. All methods block on the disk."""

    def __init__(self, database: FilesDatabase) -> None:
        self._database = database

    def create(self, owner: str, batch: Batch, outputs_expire_s: int | None) -> None:
        """Store a new batch. Raises RateLimitError if too many are active."""
        with self._database.transaction() as connection:
            if connection.execute("SELECT count(*) FROM batches WHERE active").fetchone()[0] >= MAX_ACTIVE:
                raise RateLimitError(f"{MAX_ACTIVE} batches are active. Wait for one to finish, or cancel one.")
            connection.execute(
                "INSERT INTO batches (id, owner, input_id, active, outputs_expire_s, body) VALUES (?, ?, ?, 1, ?, ?)",
                (batch.id, owner, batch.input_file_id, outputs_expire_s, _text(batch)),
            )
            newest = "SELECT position FROM batches WHERE NOT active ORDER BY position DESC LIMIT 1 OFFSET ?"
            connection.execute(f"DELETE FROM batches WHERE NOT active AND position <= ({newest})", (_MAX_KEPT,))

    def get(self, owner: str, batch_id: str) -> Batch:
        """Return a batch. Raises NotFoundError."""
        rows = self._database.rows("SELECT body FROM batches WHERE owner = ? AND id = ?", owner, batch_id)
        return _batch(only(rows, batch_id)[0])

    def page(self, owner: str, wanted: Page) -> tuple[list[Batch], bool]:
        """Return one page, and whether more follow. Raises NotFoundError."""
        where = {"owner = ?": owner}
        return self._database.page("SELECT body FROM batches", wanted, where, lambda row: _batch(row[0]))

    def cancel(self, owner: str, batch_id: str) -> Batch:
        """Cancel a batch: at once if it has not begun, else when its requests in flight have ended. Raises
        NotFoundError, and InvalidRequestError if the batch is over."""
        self.get(owner, batch_id)

        def cancelling(batch: Batch) -> None:
            if batch.status in ("validating", "in_progress"):
                begun = batch.status == "in_progress"
                batch.set_status("cancelling")
                if not begun:
                    batch.set_status("cancelled")
            elif batch.status not in ("cancelling", "cancelled"):
                raise InvalidRequestError(f"The batch is {batch.status} and can no longer be cancelled.")

        return self.change(batch_id, cancelling)

    def delete(self, owner: str, batch_id: str) -> Batch:
        """Delete a batch, but not its files. Raises NotFoundError, and InvalidRequestError if the batch is not over."""
        batch = self.get(owner, batch_id)
        if not batch.is_over:
            raise InvalidRequestError("The batch has not ended. Wait for its end, or cancel it first.")
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM batches WHERE id = ?", (batch_id,))
        return batch

    def next(self) -> BatchJob | None:
        """Return the oldest batch that is not over, or None."""
        rows = self._database.rows(f"SELECT {_COLUMNS} FROM batches WHERE active ORDER BY position LIMIT 1")
        if not rows:
            return None
        owner, output_id, error_id, outputs_expire_s, body = rows[0]
        return BatchJob(owner, output_id, error_id, outputs_expire_s, _batch(body))

    def begin(self, batch_id: str, total: int, output_id: str, error_id: str) -> Batch:
        """Record the output files of a batch, and start the batch unless it was cancelled."""

        def begin(batch: Batch) -> None:
            if batch.status == "validating":
                batch.set_status("in_progress")
                batch.request_counts.total = total

        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE batches SET output_id = ?, error_id = ? WHERE id = ? AND active",
                (output_id, error_id, batch_id),
            )
            return _change(connection, batch_id, begin)

    def change(self, batch_id: str, change: Callable[[Batch], None]) -> Batch:
        """Apply `change` to the stored batch, atomically. If `change` raises, the batch stays unchanged."""
        with self._database.transaction() as connection:
            return _change(connection, batch_id, change)

    def finish(self, batch_id: str, change: Callable[[Batch], None], outputs: dict[str, FileMetadata | None]) -> Batch:
        """Apply the final `change`, publish outputs with metadata and delete outputs without metadata, atomically."""
        with self._database.transaction() as connection:
            for file_id, label in outputs.items():
                if label is None:
                    connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
                else:
                    complete_file(connection, file_id, label)
            return _change(connection, batch_id, change)


def _change(connection: sqlite3.Connection, batch_id: str, change: Callable[[Batch], None]) -> Batch:
    batch = _batch(connection.execute("SELECT body FROM batches WHERE id = ?", (batch_id,)).fetchone()[0])
    change(batch)
    connection.execute(
        "UPDATE batches SET body = ?, active = ? WHERE id = ?", (_text(batch), not batch.is_over, batch_id)
    )
    return batch


def _batch(body: str) -> Batch:
    return msgspec.json.decode(body, type=Batch)


def _text(batch: Any) -> str:
    return msgspec.json.encode(batch).decode()


prepare_types(Batch)
