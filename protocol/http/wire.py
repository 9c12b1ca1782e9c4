"""A request and a response as bytes: the seam between the router and whatever carries it.

The SDK's transports, the daemon's HTTP shell and the tests all speak these two types, so the cascade is written once
and knows nothing of sockets, httpx or ASGI.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from .foreign import json_bytes

LONG_BODY = 2**16
T = TypeVar("T")
_MESSAGES, _OLLAMA = "/v1/messages", "/api/"
_ANTHROPIC_TYPES = frozenset(
    ("invalid_request_error", "authentication_error", "permission_error", "not_found_error", "rate_limit_error",
     "timeout_error", "overloaded_error")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WireRequest:
    """An HTTP request without a socket."""

    method: str
    path: str
    # Lower-cased names.
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    # None means no limit.
    timeout_s: float | None = None
    # Without the question mark.
    query: str = ""
    # The body as it comes, where it may be too long for memory. `body` is empty then.
    upload: AsyncIterator[bytes] | None = None
    # The cloud's API key that the caller names for this request. None: the key in the settings. No server sets it.
    cloud_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class WireResponse:
    """An HTTP response without a socket: `body` is whole, or an async stream the carrier must exhaust or `aclose()`."""

    status: int
    headers: Mapping[str, str]
    body: bytes | AsyncIterator[bytes]

    @staticmethod
    def json(payload: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> WireResponse:
        return WireResponse(status, {"content-type": "application/json", **(headers or {})}, json_bytes(payload))


async def off_event_loop(body: bytes, work: Callable[[], T]) -> T:
    """The result of `work`; for a long body it is computed in a thread, off the event loop."""
    return await asyncio.to_thread(work) if len(body) > LONG_BODY else work()


def error_body(error: dict[str, Any], path: str) -> dict[str, Any]:
    """The body of an error of ours, as the clients that call `path` read it."""
    if path.startswith(_MESSAGES):
        return anthropic_error(error)
    return {"error": error["message"]} if path.startswith(_OLLAMA) else {"error": error}


def anthropic_error(error: dict[str, Any]) -> dict[str, Any]:
    """An OpenAI error as Anthropic's clients read it; `param` and `code` stay."""
    kind = error.get("type")
    if error.get("code") in ("not_found", "model_not_found"):
        kind = "not_found_error"
    return {"type": "error", "error": {**error, "type": kind if kind in _ANTHROPIC_TYPES else "api_error"}}


def with_error_of(response: WireResponse, path: str) -> WireResponse:
    """The response; an error has the shape that the clients of `path` read."""
    if response.status < 400 or not isinstance(response.body, bytes) or not path.startswith((_MESSAGES, _OLLAMA)):
        return response
    return replace(response, body=msgspec.json.encode(error_body(msgspec.json.decode(response.body)["error"], path)))
