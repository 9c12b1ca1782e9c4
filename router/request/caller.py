"""Caller of a request, identified by digests, so that the ledger and limits work per API key without storing keys."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Caller:
    """Digests of the API key and of the request's `user`: 32 hexadecimal digits each; empty without a key or user."""

    key: str = ""
    user: str = ""

    def with_user(self, body: Mapping[str, Any]) -> Caller:
        """Return the caller with the digest of the `user` field in a request body."""
        user: Any = body.get("user")
        return replace(self, user=_digest(user)) if isinstance(user, str) else self


#: Header name in stored batch requests for the digest of the API key. Clients cannot send a name with a space.
DIGEST_HEADER = "x-updraft-key digest"


def caller_of(headers: Mapping[str, str]) -> Caller:
    """Return the caller whose key is in the `Authorization` header, or in Anthropic's `x-api-key`."""
    api_key = headers.get("x-api-key", "")
    scheme, _, key = headers.get("authorization", f"bearer {api_key}" if api_key else "").partition(" ")
    return Caller(_digest(key.strip()) if scheme.lower() == "bearer" else headers.get(DIGEST_HEADER, ""))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()[:32] if secret else ""
