"""SQLite store of Responses and chat completions, kept for a number of days."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from ...accounting.budget import DAY_S
from ...protocol.errors import ConfigurationError, NotFoundError
from ...protocol.http.lenient_json import json_bytes, json_of
from ...protocol.safety.database import Database, SharedFile, columns, tables, transaction

T = TypeVar("T")
Kind = Literal["response", "chat.completion", "conversation"]
_SCHEMA = (
    """CREATE TABLE answers (
      position INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, kind TEXT NOT NULL, id TEXT NOT NULL,
      created REAL NOT NULL, model TEXT NOT NULL, metadata TEXT NOT NULL, body TEXT NOT NULL, input TEXT NOT NULL,
      events TEXT NOT NULL, private INTEGER NOT NULL DEFAULT 0, UNIQUE (owner, kind, id)
    ) STRICT""",
    "CREATE INDEX answers_created ON answers (created)",
    "CREATE INDEX answers_in_order ON answers (owner, kind, position)",
)
_ADD_PRIVATE = "ALTER TABLE answers ADD COLUMN private INTEGER NOT NULL DEFAULT 0"
_INDEX_PRIVATE = "CREATE INDEX IF NOT EXISTS answers_private ON answers (owner) WHERE private"


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A stored answer with its input."""

    # Digest of the caller's key. Other callers cannot see the answer.
    owner: str
    kind: Kind
    id: str
    # Time of creation, in seconds since the epoch.
    created: float
    # Model named in the answer.
    model: str
    metadata: dict[str, str]
    # Answer as it was sent, or the description of a conversation.
    body: dict[str, Any]
    # Items or messages that the answer responds to, or that the conversation holds.
    input: list[dict[str, Any]]
    # Events of the stream, if the answer was created in the background.
    events: list[str] = field(default_factory=list[str])
    # Whether requests that continue this answer must stay on the device.
    private: bool = False

    def with_metadata(self, metadata: dict[str, str]) -> StoredAnswer:
        return replace(self, metadata=metadata, body={**self.body, "metadata": metadata})


@dataclass(frozen=True, slots=True)
class Page:
    """Requested part of a list."""

    limit: int = 20
    # ID of the entry before the page.
    after: str | None = None
    newest_first: bool = False


_COLUMNS = tuple(item.name for item in fields(StoredAnswer))
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM answers"
_JSON = ("metadata", "body", "input", "events")


class StoreDatabase(Database):
    """Database whose tables have a `position` and an `id`."""

    def rows(self, query: str, *values: str | float | None) -> list[tuple[Any, ...]]:
        with self.use() as connection:
            return connection.execute(query, values).fetchall()

    def page(
        self,
        select: str,
        wanted: Page,
        where: Mapping[str, str | float],
        make: Callable[[tuple[Any, ...]], T],
        filters: Iterable[tuple[str, ...]] = (),
    ) -> tuple[list[T], bool]:
        """Return a page of the rows of `select`, each converted by `make`, and whether more follow. Raises
        NotFoundError for an unknown `wanted.after`.

        `where`: values of conditions such as `owner = ?`. `filters`: conditions, each followed by its values, which the
        row before the page need not fulfil.
        """
        conditions, values = " AND ".join(where), [*where.values()]
        if wanted.after is not None:
            _, _, table = select.rpartition(" ")
            positions = self.rows(f"SELECT position FROM {table} WHERE {conditions} AND id = ?", *values, wanted.after)
            conditions += f" AND position {'<' if wanted.newest_first else '>'} ?"
            values.append(only(positions, wanted.after)[0])
        for condition, *given in filters:
            conditions += f" AND {condition}"
            values += given
        order = f"ORDER BY position {'DESC' if wanted.newest_first else 'ASC'} LIMIT ?"
        rows = self.rows(f"{select} WHERE {conditions} {order}", *values, wanted.limit + 1)
        return [make(row) for row in rows[: wanted.limit]], len(rows) > wanted.limit


class AnswerStore:
    """Store of answers, safe for concurrent use by threads and processes. Answers older than `days`, and all but the
    newest `most`, are deleted. Raises ConfigurationError if the file is unusable or holds something else."""

    def __init__(self, path: Path, *, days: int, most: int) -> None:
        self._days = days
        self._most = most
        self._path = path
        self._database = StoreDatabase(SharedFile(path, "as the store of answers", "store"), self._create)

    def _create(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA secure_delete=ON")
        with transaction(connection):
            names = tables(connection)
            if names and "answers" not in names:
                raise ConfigurationError(f"{self._path} is not an answer store. Choose another file.", param="store")
            if not names:
                for statement in _SCHEMA:
                    connection.execute(statement)
            elif "private" not in columns(connection, "answers"):
                connection.execute(_ADD_PRIVATE)
            connection.execute(_INDEX_PRIVATE)
            self._prune(connection)

    def put(self, answer: StoredAnswer) -> None:
        """Store an answer. Raises sqlite3.Error, also if the ID is taken, and ValueError for a lone surrogate."""
        values = [
            json_bytes(value).decode() if name in _JSON else value
            for name, value in zip(_COLUMNS, astuple(answer), strict=True)
        ]
        marks = ", ".join("?" * len(_COLUMNS))
        with self._database.transaction() as connection:
            connection.execute(f"INSERT INTO answers ({', '.join(_COLUMNS)}) VALUES ({marks})", values)
            self._prune(connection)

    def get(self, owner: str, kind: Kind, answer_id: str) -> StoredAnswer:
        """Return an answer. Raises NotFoundError."""
        with self._database.use() as connection:
            return self._get(connection, owner, kind, answer_id)

    def page(
        self,
        owner: str,
        kind: Kind,
        wanted: Page,
        *,
        model: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> tuple[list[StoredAnswer], bool]:
        """Return a page of answers, and whether more follow. `model`, `metadata`: filters. Raises NotFoundError."""
        where = {"owner = ?": owner, "kind = ?": kind, "created >= ?": self._oldest()}
        has_pair = "EXISTS (SELECT 1 FROM json_each(metadata) WHERE key = ? AND value = ?)"
        filters = [(has_pair, *pair) for pair in (metadata or {}).items()]
        return self._database.page(
            _SELECT, wanted, where, _answer, [*filters, *([] if model is None else [("model = ?", model)])]
        )

    def change(
        self, owner: str, kind: Kind, answer_id: str, change: Callable[[StoredAnswer], StoredAnswer]
    ) -> StoredAnswer:
        """Apply `change` to an answer's metadata, body, input and privacy, atomically, and return the changed answer.
        Raises NotFoundError."""
        key = (owner, kind, answer_id)
        with self._database.transaction() as connection:
            changed = change(self._get(connection, *key))
            texts = [json_bytes(each).decode() for each in (changed.metadata, changed.body, changed.input)]
            sets = "metadata = ?, body = ?, input = ?, private = ?"
            query = f"UPDATE answers SET {sets} WHERE owner = ? AND kind = ? AND id = ?"
            connection.execute(query, (*texts, changed.private, *key))
        return changed

    def delete(self, owner: str, kind: Kind, answer_id: str) -> None:
        """Delete an answer. Raises NotFoundError."""
        with self._database.use() as connection:
            deleted = connection.execute(
                "DELETE FROM answers WHERE owner = ? AND kind = ? AND id = ?", (owner, kind, answer_id)
            )
        if not deleted.rowcount:
            raise missing(answer_id)

    def items(self, owner: str, ids: Collection[str]) -> tuple[dict[str, dict[str, Any]], bool]:
        """Return the items with these IDs, from responses and their inputs, and whether one of these responses is
        private. Raises NotFoundError for an unknown ID."""
        items: dict[str, dict[str, Any]] = {}
        is_private = False
        after, more = None, True
        while more and len(items) < len(ids):
            answers, more = self.page(owner, "response", Page(after=after, newest_first=True))
            for answer in answers:
                each = (*answer.body["output"], *answer.input)
                named = {item["id"]: item for item in each if item["id"] in ids}
                items |= named
                is_private = is_private or (answer.private and bool(named))
            after = answers[-1].id if answers else None
        for item_id in ids:
            if item_id not in items:
                raise missing(item_id)
        return items, is_private

    def has_private(self, owner: str, ids: Collection[str]) -> bool:
        """Return whether a private answer or conversation has an item with one of these IDs."""
        members = [json_bytes({"id": each}).decode()[1:-1] for each in ids]
        query = "SELECT body, input FROM answers WHERE owner = ? AND private AND created >= ?"
        with self._database.use() as connection:
            rows = connection.execute(query, (owner, self._oldest())) if members else ()
            return any(member in text for row in rows for text in row for member in members)

    def close(self) -> None:
        self._database.close()

    def _get(self, connection: sqlite3.Connection, *key: str) -> StoredAnswer:
        """Return the stored answer with this owner, kind and ID, unless it has expired. Raises NotFoundError."""
        query = f"{_SELECT} WHERE created >= ? AND owner = ? AND kind = ? AND id = ?"
        return _answer(only(connection.execute(query, (self._oldest(), *key)).fetchall(), key[-1]))

    def _oldest(self) -> float:
        return time.time() - self._days * DAY_S

    def _prune(self, connection: sqlite3.Connection) -> None:
        newest = "SELECT position FROM answers ORDER BY position DESC LIMIT 1 OFFSET ?"
        connection.execute("DELETE FROM answers WHERE created < ?", (self._oldest(),))
        connection.execute(f"DELETE FROM answers WHERE position <= ({newest})", (self._most,))


def only(entries: Sequence[T], entry_id: str) -> T:
    """Return the entry that a store found for an ID. Raises NotFoundError for an empty list."""
    if not entries:
        raise missing(entry_id)
    return entries[0]


def missing(answer_id: str) -> NotFoundError:
    return NotFoundError(f"{answer_id[:100]!r} does not exist, or was deleted or has expired.")


def _answer(row: tuple[Any, ...]) -> StoredAnswer:
    values = dict(zip(_COLUMNS, row, strict=True))
    values |= {name: json_of(values[name].encode(), exact=True) for name in _JSON}
    values["private"] = bool(values["private"])
    return StoredAnswer(**values)
