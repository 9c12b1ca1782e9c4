"""API keys: hashed at rest, compared in constant time, never logged."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...protocol.errors import AuthenticationError, ConfigurationError

_LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64}):(?P<digest>[0-9a-f]{64})")


def new_key(name: str) -> tuple[str, str]:
    """A fresh key for `name`: the secret to hand out, and the line to put into the key file."""
    key = f"updraft-{secrets.token_urlsafe(32)}"
    line = f"{name}:{_digest(key)}"
    if not _LINE.fullmatch(line):
        raise ConfigurationError(f"A key name is 1 to 64 letters, digits, dots, dashes or underscores, not {name!r}.")
    return key, line


class KeyStore:
    """Who may use the gateway. `KeyStore({})` lets everybody in, under the name `anonymous`."""

    def __init__(self, digests: Mapping[str, str]) -> None:
        """`digests`: name -> SHA-256 of the key, hexadecimal."""
        self._digests = tuple((name, digest.encode()) for name, digest in digests.items())

    @classmethod
    def load(cls, path: Path) -> KeyStore:
        """Read `name:sha256hex` lines (`#` comments) or a JSON object of the same. Raises ConfigurationError."""
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"Cannot read the key file {path}: {error}.") from error
        lines = _json_lines(text, path) if text.startswith("{") else text.splitlines()
        digests: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            match = _LINE.fullmatch(line.strip())
            if match is None:  # the line itself stays out of the message: it may be a bare key
                raise ConfigurationError(f"{path}, entry {number}: expected name:sha256hex, as `new_key` makes it.")
            if match["name"] in digests:
                raise ConfigurationError(f"{path}, entry {number}: the name {match['name']!r} is there twice.")
            digests[match["name"]] = match["digest"]
        if not digests:
            raise ConfigurationError(f"The key file {path} holds no key: add one, or use --no-auth on loopback.")
        return cls(digests)

    def name_of(self, authorization: str) -> str:
        """The name behind an `Authorization` header. Raises AuthenticationError."""
        if not self._digests:
            return "anonymous"
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise AuthenticationError("No API key: send it as `Authorization: Bearer KEY`.")
        digest = _digest(key.strip()).encode()
        found = [name for name, known in self._digests if hmac.compare_digest(known, digest)]
        if not found:
            raise AuthenticationError("This API key is not known here.")
        return found[0]


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _json_lines(text: str, path: Path) -> list[str]:
    try:
        content: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"The key file {path} is not valid JSON: {error}.") from error
    return [f"{name}:{digest}" for name, digest in content.items()]
