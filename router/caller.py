"""Who asks: API keys as digests, so that rows and limits of one key belong together and no key is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def key_digest(headers: Mapping[str, str]) -> str:
    """Of the key in `Authorization`, 32 hexadecimal digits; empty if none was sent."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return digest(key.strip()) if scheme.lower() == "bearer" and key.strip() else ""


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()[:32]
