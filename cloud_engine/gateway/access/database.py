"""The gateway's API keys in SQLite: created, listed, rotated and revoked at run time, with an audit log.

A key is shown once, at creation. Only its SHA-256 is stored.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import sqlite3
import time
from pathlib import Path
from typing import Annotated

import msgspec

from ....protocol.decoding import prepare_types
from ....protocol.errors import ConfigurationError, NotFoundError, StorageError
from ....protocol.http.wire import new_id
from ....protocol.safety.database import SharedFile, transaction
from ....protocol.safety.private_files import has_file
from .principal import Limits, Models, Name, Principal, Priority, Scope

_DAY_S = 86_400.0
_BUSY_S = 10.0
_KEY_LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64}):(?P<digest>[0-9a-f]{64})")
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS keys (
      id TEXT PRIMARY KEY, name TEXT NOT NULL, principal TEXT NOT NULL,
      created_at REAL NOT NULL, expires_at REAL, revoked_at REAL)""",
    "CREATE UNIQUE INDEX IF NOT EXISTS live_names ON keys (name) WHERE revoked_at IS NULL",
    """CREATE TABLE IF NOT EXISTS digests (
      digest BLOB PRIMARY KEY, key_id TEXT NOT NULL REFERENCES keys (id), expires_at REAL) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS audit (
      id INTEGER PRIMARY KEY, at REAL NOT NULL, actor TEXT NOT NULL, action TEXT NOT NULL,
      key_id TEXT NOT NULL, name TEXT NOT NULL)""",
    """CREATE TRIGGER IF NOT EXISTS audit_keeps_rows BEFORE DELETE ON audit
      BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END""",
    """CREATE TRIGGER IF NOT EXISTS audit_keeps_facts BEFORE UPDATE ON audit
      BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END""",
    # Former name of the limit `max_concurrency`.
    """UPDATE keys SET principal = replace(principal, '"concurrent":', '"max_concurrency":')
      WHERE principal LIKE '%"concurrent":%'""",
)


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to create a key."""

    # Name of the key in usage rows; unique among live keys.
    name: Name
    # Tenant that owns the key. None: the key's own name.
    tenant: Name | None = None
    scopes: Annotated[tuple[Scope, ...], msgspec.Meta(min_length=1, max_length=4)] = ("inference",)
    priority: Priority = "interactive"
    # Models that the key may use. Absent: all. An empty list is refused, because it could mean none.
    models: Annotated[Models, msgspec.Meta(min_length=1)] = ()
    limits: Limits = Limits()
    # Days until the key expires. None: never.
    expires_in_days: Annotated[float, msgspec.Meta(gt=0, le=36_500)] | None = None


class KeyRotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to rotate a key."""

    # Seconds during which the old secret stays valid, so that apps can switch to the new one.
    overlap_s: Annotated[float, msgspec.Meta(ge=0, le=30 * _DAY_S)] = 0.0


prepare_types(NewKey, KeyRotation)


class KeyRecord(msgspec.Struct, frozen=True):
    """A key as shown to an operator."""

    principal: Principal
    # Time of creation, in seconds since the epoch.
    created_at: float
    # Time of expiry, in seconds since the epoch. None: never.
    expires_at: float | None


class AuditEntry(msgspec.Struct, frozen=True):
    """One audited change of a key."""

    # Time of the change, in seconds since the epoch.
    at: float
    # The admin key, or the local user, that made the change.
    actor: str
    # Kind of change: `create`, `import`, `rotate` or `revoke`.
    action: str
    key_id: str
    # Name of the key when the change was made.
    name: str


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class KeyDatabase:
    """The key database file, readable by its owner only. Each method is one transaction and is thread-safe."""

    def __init__(self, path: Path) -> None:
        """Open the database file, or create it. Raises ConfigurationError."""
        self.path = path
        self._file = SharedFile(path, "as the key database", "keys", _BUSY_S)
        self._file.create(_SCHEMA)

    @classmethod
    def existing(cls, path: Path) -> KeyDatabase:
        """Open an existing key database. Raises ConfigurationError if the file is missing."""
        if not has_file(path):
            raise ConfigurationError(
                f"The key database {path} does not exist: create a key with `updraft keys create NAME --keys {path}`.",
                param="keys",
            )
        try:
            return cls(path)
        except StorageError as error:
            if "not a database" not in error.message:
                raise
            raise ConfigurationError(
                f"{path} is not a key database. Import an older key file with `updraft keys import {path}`.",
                param="keys",
            ) from error

    def create(self, new: NewKey, actor: str) -> tuple[KeyRecord, str]:
        """Return the new key's record and its secret. Raises ConfigurationError if the name is taken."""
        key = _new_key()
        with self._file.connected() as connection, transaction(connection):
            return _store_key(connection, new, digest_of(key), (actor, "create")), key

    def take_over(self, text: str, actor: str) -> list[KeyRecord]:
        """Import all keys of a key file, or no key if any line is invalid. Raises ConfigurationError.

        `text`: lines of `name:sha256`, or a JSON object that maps names to SHA-256 hashes. Errors never quote a line.
        Apps can keep using the imported keys.
        """
        try:
            lines = text.splitlines()
            if text.lstrip().startswith("{"):
                msgspec.json.decode(text, type=dict[str, str])
                pairs = json.loads(text, object_pairs_hook=list)  # a list keeps repeated names, which are refused below
                lines = [f"{name}:{digest}" for name, digest in pairs]
        except msgspec.DecodeError as error:
            raise ConfigurationError("The key file is not a JSON object of names and hashes.") from error
        records: list[KeyRecord] = []
        with self._file.connected() as connection, transaction(connection):
            for number, line in enumerate(lines, 1):
                if not line.strip() or line.startswith("#"):
                    continue
                if (match := _KEY_LINE.fullmatch(line.strip())) is None:
                    raise ConfigurationError(f"Line {number} of the key file is not of the form name:sha256.")
                digest = bytes.fromhex(match["digest"])
                records.append(_store_key(connection, NewKey(match["name"]), digest, (actor, "import")))
        return records

    def keys(self) -> list[KeyRecord]:
        """Return the keys that are not revoked, sorted by name."""
        with self._file.connected() as connection:
            rows = connection.execute(f"SELECT {_RECORD} FROM keys WHERE revoked_at IS NULL ORDER BY name")
            return [_record(row) for row in rows]

    def rotate(self, key: str, actor: str, rotation: KeyRotation | None = None) -> tuple[KeyRecord, str]:
        """Return a key's record and its new secret. `key`: the key's id or name. Raises NotFoundError."""
        now, fresh = time.time(), _new_key()
        until = now + (rotation or KeyRotation()).overlap_s
        with self._file.connected() as connection, transaction(connection):
            record = _live(connection, key)
            key_id = record.principal.key_id
            connection.execute("DELETE FROM digests WHERE key_id = ? AND expires_at <= ?", (key_id, now))
            connection.execute(
                "UPDATE digests SET expires_at = min(coalesce(expires_at, ?1), ?1) WHERE key_id = ?2", (until, key_id)
            )
            connection.execute("INSERT INTO digests VALUES (?, ?, ?)", (digest_of(fresh), key_id, record.expires_at))
            _note(connection, actor, "rotate", record.principal)
        return record, fresh

    def revoke(self, key: str, actor: str) -> KeyRecord:
        """Revoke a key, identified by its id or name. Raises NotFoundError if no such key exists."""
        with self._file.connected() as connection, transaction(connection):
            record = _live(connection, key)
            key_id = record.principal.key_id
            connection.execute("DELETE FROM digests WHERE key_id = ?", (key_id,))
            connection.execute("UPDATE keys SET revoked_at = ? WHERE id = ?", (time.time(), key_id))
            _note(connection, actor, "revoke", record.principal)
        return record

    def audit(self, most: int = 1000) -> list[AuditEntry]:
        """Return up to `most` changes of keys, newest first."""
        with self._file.connected() as connection:
            rows = connection.execute(
                "SELECT at, actor, action, key_id, name FROM audit ORDER BY id DESC LIMIT ?", (most,)
            )
            return [AuditEntry(*row) for row in rows]


def _store_key(connection: sqlite3.Connection, new: NewKey, digest: bytes, by: tuple[str, str]) -> KeyRecord:
    """Insert a new key. `by`: the actor and action to log. Raises ConfigurationError if the name is taken."""
    now = time.time()
    principal = Principal(
        new_id("key"), new.name, new.tenant or new.name, new.scopes, new.priority, new.models, new.limits
    )
    expires_at = None if new.expires_in_days is None else now + new.expires_in_days * _DAY_S
    taken = "SELECT 1 FROM keys WHERE revoked_at IS NULL AND ? IN (id, name)"  # keys are managed by either
    if connection.execute(taken, (new.name,)).fetchone():
        raise ConfigurationError(
            f"A key {new.name!r} already exists: rotate or revoke it, or choose another name.", param="name"
        )
    row = (principal.key_id, new.name, msgspec.json.encode(principal).decode(), now, expires_at)
    connection.execute("INSERT INTO keys (id, name, principal, created_at, expires_at) VALUES (?, ?, ?, ?, ?)", row)
    connection.execute("INSERT INTO digests VALUES (?, ?, ?)", (digest, principal.key_id, expires_at))
    _note(connection, *by, principal)
    return KeyRecord(principal, now, expires_at)


_RECORD = "principal, created_at, expires_at"


def _record(row: tuple[str, float, float | None]) -> KeyRecord:
    return KeyRecord(msgspec.json.decode(row[0], type=Principal), row[1], row[2])


def _live(connection: sqlite3.Connection, key: str) -> KeyRecord:
    row = connection.execute(
        f"SELECT {_RECORD} FROM keys WHERE revoked_at IS NULL AND ? IN (id, name) ORDER BY id = ? DESC", (key, key)
    ).fetchone()
    if row is None:
        raise NotFoundError(f"There is no key {key[:64]!r}: `updraft keys list` shows all keys.", code="key_not_found")
    return _record(row)


def _note(connection: sqlite3.Connection, actor: str, action: str, key: Principal) -> None:
    entry = (time.time(), actor, action, key.key_id, key.name)
    connection.execute("INSERT INTO audit (at, actor, action, key_id, name) VALUES (?, ?, ?, ?, ?)", entry)


def _new_key() -> str:
    return f"updraft-{secrets.token_urlsafe(32)}"
