"""Evidence of tasks: a SQLite file with every sampled request and its grades, shared by all processes of a user.

A row is written before its answers exist, and graded later, so that a kill can lose no request that went badly. All
licences follow from the rows in their order; nothing else is stored about them. Texts are not stored: a task's id is a
digest that depends on a random key in the file.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ...classifier.licences.answer_policies import AnsweredRequest
from ...classifier.licences.task_learner import SampledRow
from ...protocol.errors import ConfigurationError, InvalidRequestError, NotFoundError
from ...protocol.safety.database import Database, SharedFile, tables, transaction
from .identity import MAX_NAME_CHARS, TaskShape, printable_name

#: Seconds after which a sampled row without a grade counts as a wrong answer of the device.
GRADED_WITHIN_S = 900.0
#: Tier to which the user pinned a task. `auto`: the evidence decides.
Pin = Literal["auto", "local", "cloud"]
_VERSION, _KEY_BYTES, _ID_BYTES = 2, 32, 6
_SCHEMA = (
    "CREATE TABLE tasks (id TEXT PRIMARY KEY, name TEXT NOT NULL, title TEXT NOT NULL, pin TEXT NOT NULL,"
    " joined TEXT NOT NULL, changes INTEGER NOT NULL, first_at REAL NOT NULL) STRICT",
    "CREATE TABLE samples (seq INTEGER PRIMARY KEY AUTOINCREMENT, task TEXT NOT NULL, pair TEXT NOT NULL,"
    " request TEXT NOT NULL UNIQUE, at REAL NOT NULL, local REAL, cloud REAL, grader TEXT NOT NULL,"
    " fault TEXT NOT NULL, features BLOB, owner TEXT NOT NULL DEFAULT '') STRICT",
    "CREATE INDEX samples_task ON samples (task, pair, seq)",
    "CREATE TABLE digest_key (key BLOB NOT NULL) STRICT",
)
# Deletes the oldest rows of the task of a request, and keeps the newest.
_PRUNE = (
    "DELETE FROM samples WHERE (task, pair) = (SELECT task, pair FROM samples WHERE request = ?) AND seq <= (SELECT seq"
    " FROM samples AS newer WHERE (newer.task, newer.pair) = (samples.task, samples.pair)"
    " ORDER BY seq DESC LIMIT 1 OFFSET ?)"
)
_MAX_ROWS = 5_000  # rows of a task and pair that are kept
_TASK = "id, name, title, pin, joined, changes"
_SAMPLE = "seq, task, request, at, local, cloud, grader, fault, features"


@dataclass(frozen=True, slots=True)
class StoredTask:
    """A task of the file."""

    # Digest of the task's shape.
    id: str
    # Name given by the caller or the user, or an empty string.
    name: str
    # Beginning of the system prompt, if texts are stored, or an empty string.
    title: str
    pin: Pin
    # Task that this one was merged into, or an empty string.
    joined: str
    # Number of changes of this task's earlier rows, by grades and merges.
    changes: int

    @property
    def label(self) -> str:
        return self.name or self.title or self.id


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled request. Its scores are from 0 to 1, and None without a grade."""

    seq: int
    task: str
    # Id of the request in the ledger.
    request: str
    # Time of the request, in seconds since the epoch.
    at: float
    local: float | None
    cloud: float | None
    # Source of the scores: `agreement`, `fields`, `you`, `none`, or an empty string while the request waits.
    grader: str
    # Visible fault of the local answer, or an empty string.
    fault: str
    # Features of the local answer, float32; None without an answer.
    features: bytes | None

    @property
    def row(self) -> SampledRow[AnsweredRequest]:
        """The row as evidence: without a grade, the device was wrong and the cloud right."""
        features = None if self.features is None else np.frombuffer(self.features, np.float32)
        request = AnsweredRequest(features, is_faulty=bool(self.fault) or features is None)
        if self.local is None or self.cloud is None:
            return SampledRow(request, 0.0, 1.0)
        return SampledRow(request, self.local, self.cloud)


@dataclass(frozen=True, slots=True)
class Grade:
    """Scores of both answers to a sampled request, from 0 to 1; None if no grader could tell."""

    local: float | None
    cloud: float | None
    grader: str
    fault: str = ""
    features: bytes | None = None


class TaskStore:
    """The evidence file. Safe for any thread and several processes. Methods raise sqlite3.Error.

    Raises ConfigurationError if the file cannot be opened, holds other data, or has another format version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._key = b""
        self._database = Database(SharedFile(path, "for tasks", "tasks"), self._create)

    def _create(self, connection: sqlite3.Connection) -> None:
        with transaction(connection):
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            existing = tables(connection)
            if "samples" in existing and version == 1:
                connection.execute("ALTER TABLE samples ADD COLUMN owner TEXT NOT NULL DEFAULT ''")
                connection.execute(f"PRAGMA user_version={_VERSION}")
            elif existing and ("samples" not in existing or version != _VERSION):
                raise ConfigurationError(
                    f"{self.path} holds no tasks of format {_VERSION}: name another file, or move this one.",
                    param="tasks",
                )
            if not existing:
                for statement in _SCHEMA:
                    connection.execute(statement)
                connection.execute("INSERT INTO digest_key VALUES (?)", (os.urandom(_KEY_BYTES),))
                connection.execute(f"PRAGMA user_version={_VERSION}")
            (self._key,) = connection.execute("SELECT key FROM digest_key").fetchone()

    @property
    def version(self) -> int:
        """Number that changes with every commit of another process."""
        with self._database.use() as connection:
            return connection.execute("PRAGMA data_version").fetchone()[0]

    def id_of(self, shape: TaskShape) -> str:
        text = shape.text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, key=self._key, digest_size=_ID_BYTES).hexdigest()

    def add_task(self, task: str, shape: TaskShape, *, keep_text: bool) -> None:
        """Store a task if it is new. `keep_text`: with the beginning of its system prompt."""
        title = shape.title if keep_text else ""
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO tasks VALUES (?, ?, ?, 'auto', '', 0, ?)", (task, shape.name, title, time.time())
            )

    def begin(self, task: str, pair: str, request: str) -> None:
        """Store a sampled request, before its answers exist."""
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO samples VALUES (NULL, ?, ?, ?, ?, NULL, NULL, '', '', NULL, ?)",
                (task, pair, request, time.time(), _process(os.getpid())),
            )

    def grade(self, request: str, grade: Grade) -> None:
        """Store the first grade of a request, if it comes in time. A later call changes nothing."""
        values = grade.local, grade.cloud, grade.grader or "none", grade.fault, grade.features, request
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE samples SET local = ?, cloud = ?, grader = ?, fault = ?, features = ?"
                " WHERE request = ? AND grader = '' AND at > ?",
                (*values, time.time() - GRADED_WITHIN_S),
            )
            connection.execute(_PRUNE, (request, _MAX_ROWS))

    def drop(self, requests: Sequence[str]) -> None:
        """Remove requests that were not graded, since the cloud gave no answer or this process ends."""
        with self._database.transaction() as connection:
            connection.executemany(
                "DELETE FROM samples WHERE request = ? AND grader = ''", [(request,) for request in requests]
            )

    def correct(self, request: str, local: float, cloud: float) -> str:
        """Replace a request's grade by the user's, and return its task. Raises NotFoundError, InvalidRequestError."""
        if not (0 <= local <= 1 and 0 <= cloud <= 1):
            raise InvalidRequestError("A grade must be from 0 (wrong) to 1 (right).")
        with self._database.transaction() as connection:
            row = connection.execute("SELECT task FROM samples WHERE request = ?", (request,)).fetchone()
            if row is None:
                raise NotFoundError(f"Request {request[:100]!r} was not sampled: see `updraft tasks show`.")
            connection.execute(
                "UPDATE samples SET local = ?, cloud = ?, grader = 'you' WHERE request = ?", (local, cloud, request)
            )
            connection.execute("UPDATE tasks SET changes = changes + 1 WHERE id = ?", row)
        return row[0]

    def rename(self, task: str, name: str) -> None:
        """Raises InvalidRequestError for an empty or unprintable name."""
        if not name or name != printable_name(name) or len(name) > MAX_NAME_CHARS:
            raise InvalidRequestError(f"A name has 1 to {MAX_NAME_CHARS} printable characters on one line.")
        with self._database.transaction() as connection:
            connection.execute("UPDATE tasks SET name = ? WHERE id = ?", (name, task))

    def set_pin(self, task: str, pin: Pin) -> None:
        with self._database.transaction() as connection:
            connection.execute("UPDATE tasks SET pin = ? WHERE id = ?", (pin, task))

    def join(self, task: str, into: str) -> None:
        """Merge `task` and all its rows into another task. Raises InvalidRequestError for a task and itself."""
        if task == into:
            raise InvalidRequestError("Both names are the same task, or were merged already: name two tasks.")
        with self._database.transaction() as connection:
            connection.execute("UPDATE samples SET task = ? WHERE task = ?", (into, task))
            connection.execute("UPDATE tasks SET joined = ? WHERE id = ? OR joined = ?", (into, task, task))
            connection.execute("UPDATE tasks SET changes = changes + 1 WHERE id = ?", (into,))

    def forget(self, task: str) -> None:
        """Delete a task with its evidence. If its app sends more requests, its licence must be proven anew."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM samples WHERE task = ?", (task,))
            connection.execute("DELETE FROM tasks WHERE id = ? OR joined = ?", (task, task))

    def tasks(self, condition: str = "TRUE", values: Sequence[str | int] = ()) -> list[StoredTask]:
        """Return the tasks that fulfil an SQL condition, oldest first."""
        query = f"SELECT {_TASK} FROM tasks WHERE {condition} ORDER BY first_at"
        with self._database.use() as connection:
            return [StoredTask(*row) for row in connection.execute(query, values).fetchall()]

    def task(self, name: str) -> StoredTask:
        """Return the task with this id, name, or beginning of an id, or the task that it was merged into. Raises
        NotFoundError, InvalidRequestError."""
        named = self.tasks("id = ?", (name,)) or self.tasks("name = ?", (name,))
        named = named or self.tasks("substr(id, 1, ?) = ?", (len(name), name))
        if len({task.joined or task.id for task in named}) > 1 or not name:
            raise InvalidRequestError(f"{name[:100]!r} names {len(named)} tasks: give an id (`updraft tasks list`).")
        if not named:
            raise NotFoundError(f"There is no task {name[:100]!r}: see `updraft tasks list`.")
        return self.by_id(named[0].joined) or named[0]

    def by_id(self, task: str) -> StoredTask | None:
        return next(iter(self.tasks("id = ?", (task,))), None)

    def counts(self, pair: str) -> dict[str, tuple[int, int]]:
        """Return the numbers of sampled and of graded requests of each task."""
        query = "SELECT task, count(*), count(local) FROM samples WHERE pair = ? AND grader <> '' GROUP BY task"
        with self._database.use() as connection:
            return {task: (rows, graded) for task, rows, graded in connection.execute(query, (pair,)).fetchall()}

    def samples(self, task: str, pair: str, after: int = 0) -> list[Sample]:
        """Return a task's rows after number `after`, in order, up to the first that may still get its grade.

        A row of an ended process gets none, so that a kill neither stops learning nor prolongs a licence.
        """
        with self._database.use() as connection:
            rows = connection.execute(
                f"SELECT owner, {_SAMPLE} FROM samples WHERE task = ? AND pair = ? AND seq > ? ORDER BY seq",
                (task, pair, after),
            ).fetchall()
        waits_from = time.time() - GRADED_WITHIN_S
        samples: list[Sample] = []
        for owner, *row in rows:
            sample = Sample(*row)
            if not sample.grader and sample.at > waits_from and not _has_ended(owner):
                break
            samples.append(sample)
        return samples

    def newest_pair(self) -> str:
        """Return the pair of the newest row, or an empty string."""
        with self._database.use() as connection:
            row = connection.execute("SELECT pair FROM samples ORDER BY seq DESC LIMIT 1").fetchone()
        return "" if row is None else row[0]

    def close(self) -> None:
        self._database.close()


def _process(pid: int) -> str:
    """Return a name that no later process has: namespace, id, start time. Empty for an ended one, or without /proc."""
    try:
        state, *_, started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:20]
        return "" if state in "ZX" else f"{Path('/proc/self/ns/pid').readlink()} {pid} {started}"
    except OSError:
        return ""


def _has_ended(owner: str) -> bool:
    """Return whether this system can tell that the process `owner` has ended. Other containers' are not visible."""
    namespace, _, process = owner.partition(" ")
    own, _, _ = _process(os.getpid()).partition(" ")
    return bool(owner) and namespace == own and _process(int(process.split()[0])) != owner
