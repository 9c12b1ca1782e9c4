"""API keys: hashed at rest, compared in constant time, never logged. Admin keys may also ask for everybody's usage."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ....protocol.errors import AuthenticationError, ConfigurationError, PermissionDeniedError
from ....protocol.unicode_forms import read_text

_LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64}):(?P<digest>[0-9a-f]{64})(?P<admin>:admin)?")


def new_key(name: str, *, admin: bool = False) -> tuple[str, str]:
    """A fresh key for `name`: the secret to hand out, and the line to put into the key file."""
    key = f"updraft-{secrets.token_urlsafe(32)}"
    line = f"{name}:{_digest(key)}{':admin' if admin else ''}"
    if not _LINE.fullmatch(line):
        raise ConfigurationError(f"A key name is 1 to 64 letters, digits, dots, dashes or underscores, not {name!r}.")
    return key, line


@dataclass(frozen=True, slots=True)
class Key:
    """`digest`: SHA-256 of the key, hexadecimal."""

    name: str
    digest: str
    admin: bool = False


class KeyStore:
    """Who may use the gateway. Without keys everybody may do everything, under the name `anonymous`."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = tuple(keys)

    @classmethod
    def load(cls, path: Path) -> KeyStore:
        """Read lines of `name:sha256hex` or `name:sha256hex:admin`, and `#` comments.

        Raises ConfigurationError.
        """
        try:
            text = read_text(path, ConfigurationError)
        except OSError as error:
            raise ConfigurationError(f"Cannot read the key file {path}: {error}.") from error
        keys: dict[str, Key] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            match = _LINE.fullmatch(line.strip())
            if match is None:  # the line itself stays out of the message: it may be a bare key
                raise ConfigurationError(
                    f"{path}, entry {number}: expected name:sha256hex, as `updraft gateway-key` makes it."
                )
            if match["name"] in keys:
                raise ConfigurationError(f"{path}, entry {number}: the name {match['name']!r} is there twice.")
            keys[match["name"]] = Key(match["name"], match["digest"], match["admin"] is not None)
        if not keys:
            raise ConfigurationError(f"The key file {path} holds no key: add one, or use --no-auth on loopback.")
        return cls(list(keys.values()))

    def name_of(self, authorization: str) -> str:
        """The name behind an `Authorization` header. Raises AuthenticationError."""
        return self._key_of(authorization).name

    def check_admin(self, authorization: str) -> None:
        """Raises AuthenticationError, or PermissionDeniedError for a key that is not an admin's."""
        if not self._key_of(authorization).admin:
            raise PermissionDeniedError("This needs an admin key: make one with `updraft gateway-key NAME --admin`.")

    def _key_of(self, authorization: str) -> Key:
        if not self._keys:
            return Key("anonymous", "", admin=True)
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise AuthenticationError("No API key: send it as `Authorization: Bearer KEY`.")
        digest = _digest(key.strip()).encode()
        found = [known for known in self._keys if hmac.compare_digest(known.digest.encode(), digest)]
        if not found:
            raise AuthenticationError("This API key is not known here.")
        return found[0]


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
