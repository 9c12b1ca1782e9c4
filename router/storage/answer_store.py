"""Answers kept for their callers: Responses and stored chat completions, in one SQLite file, for a number of days."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from ...protocol.errors import ConfigurationError, NotFoundError
from ...protocol.http.foreign import json_bytes, json_of
from ...protocol.safety.database import Database
from ...protocol.safety.shared_file import SharedFile
from ...protocol.wal import tables, transaction

Kind = Literal["response", "chat.completion"]
DAY_S = 86400.0
_SCHEMA = (
    """CREATE TABLE answers (
      position INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, kind TEXT NOT NULL, id TEXT NOT NULL,
      created REAL NOT NULL, model TEXT NOT NULL, metadata TEXT NOT NULL, body TEXT NOT NULL, input TEXT NOT NULL,
      events TEXT NOT NULL, UNIQUE (owner, kind, id)
    ) STRICT""",
    "CREATE INDEX answers_created ON answers (created)",
    "CREATE INDEX answers_in_order ON answers (owner, kind, position)",
)


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """One answer with what it answers."""

    # Digest of the caller's key: others do not see it.
    owner: str
    kind: Kind
    id: str
    # Seconds since the epoch.
    created: float
    # As the request named it.
    model: str
    metadata: dict[str, str]
    # As it was sent.
    body: dict[str, Any]
    # The items or messages that it answers.
    input: list[dict[str, Any]]
    # The events of its stream, where it was made in the background.
    events: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class Page:
    """The part of a list that is wanted."""

    limit: int = 20
    # The id of the one before the first.
    after: str | None = None
    newest_first: bool = False


_COLUMNS = tuple(item.name for item in fields(StoredAnswer))
_JSON = ("metadata", "body", "input", "events")


class AnswerStore:
    """Safe to use from any thread, and by several processes on one file.

    Answers older than `days`, and all but the newest `most`, are gone. Raises ConfigurationError if the file cannot be
    opened or holds something else.
    """

    def __init__(self, path: Path, *, days: int, most: int) -> None:
        self._days = days
        self._most = most
        self._path = path
        self._database = Database(SharedFile(path, "as the store of answers", "store"), self._create)

    def _create(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA secure_delete=ON")
        with transaction(connection):
            found = tables(connection)
            if found and "answers" not in found:
                raise ConfigurationError(f"{self._path} holds no answers of Updraft: name another file.", param="store")
            if not found:
                for statement in _SCHEMA:
                    connection.execute(statement)
            self._prune(connection)

    def put(self, answer: StoredAnswer) -> None:
        """Keep an answer. Raises sqlite3.Error, also for the id of another one, and ValueError for half a character."""
        values = [
            json_bytes(value).decode() if name in _JSON else value
            for name, value in zip(_COLUMNS, astuple(answer), strict=True)
        ]
        marks = ", ".join("?" * len(_COLUMNS))
        with self._database.transaction() as connection:
            connection.execute(f"INSERT INTO answers ({', '.join(_COLUMNS)}) VALUES ({marks})", values)
            self._prune(connection)

    def get(self, owner: str, kind: Kind, answer_id: str) -> StoredAnswer:
        """Raises NotFoundError."""
        found = self._select("owner = ? AND kind = ? AND id = ?", (owner, kind, answer_id))
        if not found:
            raise missing(answer_id)
        return found[0]

    def page(
        self,
        owner: str,
        kind: Kind,
        wanted: Page,
        *,
        model: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> tuple[list[StoredAnswer], bool]:
        """One page, of one model or with this metadata where they are given, and whether there are more.

        Raises NotFoundError for an unknown `wanted.after`.
        """
        where, values = "owner = ? AND kind = ?", [owner, kind]
        if model is not None:
            where, values = f"{where} AND model = ?", [*values, model]
        for key, value in (metadata or {}).items():
            where += " AND EXISTS (SELECT 1 FROM json_each(metadata) WHERE key = ? AND value = ?)"
            values += [key, value]
        if wanted.after is not None:
            self.get(owner, kind, wanted.after)
            place = "(SELECT position FROM answers WHERE owner = ? AND kind = ? AND id = ?)"
            where += f" AND position {'<' if wanted.newest_first else '>'} {place}"
            values += [owner, kind, wanted.after]
        order = f"ORDER BY position {'DESC' if wanted.newest_first else 'ASC'} LIMIT {wanted.limit + 1}"
        found = self._select(where, tuple(values), order)
        return found[: wanted.limit], len(found) > wanted.limit

    def update(self, owner: str, kind: Kind, answer_id: str, metadata: dict[str, str]) -> StoredAnswer:
        """Replace the metadata. Raises NotFoundError."""
        found = self.get(owner, kind, answer_id)
        changed = replace(found, metadata=metadata, body={**found.body, "metadata": metadata})
        texts = [json_bytes(each).decode() for each in (changed.metadata, changed.body)]
        with self._database.use() as connection:
            connection.execute(
                "UPDATE answers SET metadata = ?, body = ? WHERE owner = ? AND kind = ? AND id = ?",
                (*texts, owner, kind, answer_id),
            )
        return changed

    def delete(self, owner: str, kind: Kind, answer_id: str) -> None:
        """Raises NotFoundError."""
        with self._database.use() as connection:
            deleted = connection.execute(
                "DELETE FROM answers WHERE owner = ? AND kind = ? AND id = ?", (owner, kind, answer_id)
            )
        if not deleted.rowcount:
            raise missing(answer_id)

    def items(self, owner: str, ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """Items of responses, or of what they answer, by their ids. Raises NotFoundError for one that is nowhere."""
        found: dict[str, dict[str, Any]] = {}
        after, more = None, True
        while more and len(found) < len(ids):
            answers, more = self.page(owner, "response", Page(after=after, newest_first=True))
            each = (item for answer in answers for item in (*answer.body["output"], *answer.input))
            found |= {item["id"]: item for item in each if item["id"] in ids}
            after = answers[-1].id if answers else None
        for item_id in ids:
            if item_id not in found:
                raise missing(item_id)
        return found

    def close(self) -> None:
        self._database.close()

    def _select(self, where: str, values: tuple[str, ...], order: str = "") -> list[StoredAnswer]:
        """Select stored answers, without expired answers."""
        query = f"SELECT {', '.join(_COLUMNS)} FROM answers WHERE created >= ? AND {where} {order}"
        with self._database.use() as connection:
            found = connection.execute(query, (self._oldest(), *values)).fetchall()
        return [_answer(row) for row in found]

    def _oldest(self) -> float:
        return time.time() - self._days * DAY_S

    def _prune(self, connection: sqlite3.Connection) -> None:
        newest = "SELECT position FROM answers ORDER BY position DESC LIMIT 1 OFFSET ?"
        connection.execute("DELETE FROM answers WHERE created < ?", (self._oldest(),))
        connection.execute(f"DELETE FROM answers WHERE position <= ({newest})", (self._most,))


def missing(answer_id: str) -> NotFoundError:
    return NotFoundError(f"There is no {answer_id[:100]!r} here, or no longer: it was deleted, or is too old.")


def _answer(row: tuple[Any, ...]) -> StoredAnswer:
    values = dict(zip(_COLUMNS, row, strict=True))
    return StoredAnswer(**{**values, **{name: json_of(values[name].encode(), exact=True) for name in _JSON}})
