"""Authentication by API key. Keys are looked up by their SHA-256, compared in constant time, and never logged."""

from __future__ import annotations

import hmac
import logging
import os
import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from ....protocol.errors import AuthenticationError, OverloadedError
from .database import KeyDatabase, digest_of
from .principal import ANONYMOUS, Principal

_CHECK_S = 0.25  # seconds between checks for changes; a revoked key stays valid for at most this time
_MAX_CACHED = 10_000
_LOG_EVERY_S = 10.0
_log = logging.getLogger("updraft.gateway")


class _KnownKey(NamedTuple):
    digest: bytes
    principal: Principal
    # Time of expiry, in seconds since the epoch.
    expires_at: float


class KeyStore:
    """A cached reader of the key database for one worker; picks up changes by other processes. Not thread-safe.

    Without a database every caller is the principal `anonymous` and has all rights.
    """

    def __init__(self, path: Path | None) -> None:
        """Open the key database. Raises ConfigurationError if the file is missing or is not a key database."""
        self.database: KeyDatabase | None = None
        self._connection: sqlite3.Connection | None = None
        self._cache: dict[bytes, _KnownKey] = {}
        self._checked = self._logged = float("-inf")
        self._state: tuple[int, ...] = ()
        if path is None:
            return
        self.database = KeyDatabase.existing(path)
        if not self.database.keys():
            _log.warning("%s holds no keys: all requests are refused until `updraft keys create` makes one.", path)

    @property
    def failing(self) -> bool:
        """Return whether the database cannot be read, so that every request is refused."""
        with suppress(OSError, sqlite3.Error):
            # The empty digest matches no key: the lookup only tests whether the database can be read.
            return bool(self.database and self._find(self.database.path, b""))
        return True

    def principal(self, authorization: str) -> Principal:
        """Return the principal of an `Authorization` header.

        Raises AuthenticationError, or OverloadedError while the database cannot be read.
        """
        if self.database is None:
            return ANONYMOUS
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise AuthenticationError("The API key is missing: send it as `Authorization: Bearer KEY`.")
        digest = digest_of(key.strip())
        try:
            known = self._find(self.database.path, digest)
        except (OSError, sqlite3.Error) as error:
            self._cache.clear()  # cached keys may be revoked while the database cannot be read
            self._log_failure(error)
            raise OverloadedError("The key database cannot be read at the moment: try again shortly.") from error
        if known is None or not hmac.compare_digest(known.digest, digest):
            raise AuthenticationError("This API key is invalid.")
        if known.expires_at <= time.time():
            raise AuthenticationError("This API key has expired: ask for a new one.", code="expired_api_key")
        return known.principal

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _find(self, path: Path, digest: bytes) -> _KnownKey | None:
        connection = self._current(path)
        known = self._cache.get(digest)
        if known is None and (row := connection.execute(_BY_DIGEST, (digest,)).fetchone()):
            principal = msgspec.json.decode(row[1], type=Principal)
            known = _KnownKey(row[0], principal, float("inf") if row[2] is None else row[2])
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            self._cache[digest] = known
        return known

    def _current(self, path: Path) -> sqlite3.Connection:
        """Return the database connection, and empty the cache of keys if the database has changed."""
        now = time.monotonic()
        if self._connection is not None and now < self._checked + _CHECK_S:
            return self._connection
        file = os.stat(path)  # noqa: PTH116 - the file may have been replaced by another database
        if self._connection is None or self._state[:2] != (file.st_dev, file.st_ino):
            self.close()
            self._connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=1, check_same_thread=False
            )
        (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        state = (file.st_dev, file.st_ino, version)
        if state != self._state:
            self._cache.clear()
            self._state = state
        self._checked = now
        return self._connection

    def _log_failure(self, error: Exception) -> None:
        now = time.monotonic()
        if now >= self._logged + _LOG_EVERY_S:
            self._logged = now
            _log.error("Cannot read the key database, every request is refused: %s", error)


_BY_DIGEST = (
    "SELECT digests.digest, keys.principal, digests.expires_at FROM digests JOIN keys ON keys.id = digests.key_id "
    "WHERE digests.digest = ? AND keys.revoked_at IS NULL"
)
