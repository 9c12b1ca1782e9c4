"""The caller of a request: API keys as digests, so that rows and limits of one key belong together."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Caller:
    """Digests of the API key and of the request's `user`, 32 hexadecimal digits each; empty where there is none."""

    key: str = ""
    user: str = ""

    def with_user(self, body: Mapping[str, Any]) -> Caller:
        """The same, with OpenAI's `user` field of a request's body."""
        user: Any = body.get("user")
        return replace(self, user=_digest(user)) if isinstance(user, str) else self


#: Stands for `Authorization` in requests of batches, of whose key the digest is kept. No HTTP header has such a name.
DIGEST_HEADER = "x-updraft-key digest"


def caller_of(headers: Mapping[str, str]) -> Caller:
    """From the `Authorization` header, or Anthropic's `x-api-key`."""
    api_key = headers.get("x-api-key", "")
    scheme, _, key = headers.get("authorization", f"bearer {api_key}" if api_key else "").partition(" ")
    return Caller(_digest(key.strip()) if scheme.lower() == "bearer" else headers.get(DIGEST_HEADER, ""))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()[:32] if secret else ""
