"""HTTP requests and responses of every transport, so that the router does not depend on sockets, httpx or ASGI."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from .forwarding import NativeRequest
from .lenient_json import json_bytes

LONG_BODY = 2**16
T = TypeVar("T")
_MESSAGES, _OLLAMA = "/v1/messages", "/api/"
_ANTHROPIC_TYPES = frozenset(
    ("invalid_request_error", "authentication_error", "permission_error", "not_found_error", "rate_limit_error",
     "timeout_error", "overloaded_error")
)  # fmt: skip


@dataclass(slots=True)
class PrivacyMark:
    """Mark of requests that must stay on the device. Endpoints set the mark for private earlier turns, and the router
    for private requests. All translations of a request share its mark."""

    # Whether the request must stay on the device.
    is_private: bool = False


@dataclass(frozen=True, slots=True)
class WireRequest:
    """An HTTP request without a socket."""

    method: str
    path: str
    # Header values by lower-case name.
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    # Timeout in seconds; None: no limit.
    timeout_s: float | None = None
    # Query string without the question mark.
    query: str = ""
    # Streamed body, for bodies that may not fit into memory. In this case `body` is empty.
    upload: AsyncIterator[bytes] | None = None
    # Responses of this WebSocket that are kept in memory only, by ID. None: the request came over HTTP.
    unstored: dict[str, Any] | None = None
    mark: PrivacyMark = field(default_factory=PrivacyMark)
    # Notes on accepted parts of the body that the translation to a chat request left out.
    hints: tuple[str, ...] = ()
    # The caller's names of the chat request's fields, such as `think` for `reasoning_effort`, for errors and notes.
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    # Retries of a failed cloud call. openai's client in this process sets the number, and servers keep the default.
    retries: int = 2
    # The caller's API key for the cloud. None: the key in the settings. Only the SDK sets this, never a server.
    cloud_key: str | None = field(default=None, repr=False)
    # The untranslated request, if `body` is a translation.
    native: NativeRequest | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class WireResponse:
    """An HTTP response without a socket. A streamed `body` must be exhausted or closed with `aclose()`."""

    status: int
    headers: Mapping[str, str]
    body: bytes | AsyncIterator[bytes]

    @staticmethod
    def json(payload: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> WireResponse:
        return WireResponse(status, {"content-type": "application/json", **(headers or {})}, json_bytes(payload))


async def close_body(body: object) -> None:
    """Close a streamed body, unless it is a plain iterator."""
    close: Any = getattr(body, "aclose", None)
    if close is not None:
        await close()


async def off_event_loop(body: bytes, work: Callable[[], T]) -> T:
    """Run `work`, in a thread if `body` is long, to keep the event loop responsive."""
    return await asyncio.to_thread(work) if len(body) > LONG_BODY else work()


def error_body(error: dict[str, Any], path: str) -> dict[str, Any]:
    """Convert an OpenAI error to the format that clients of `path` expect."""
    if path.startswith(_MESSAGES):
        return anthropic_error(error)
    return {"error": error["message"]} if path.startswith(_OLLAMA) else {"error": error}


def anthropic_error(error: dict[str, Any]) -> dict[str, Any]:
    """Convert an OpenAI error to Anthropic's format, keeping `param` and `code`."""
    kind = error.get("type")
    if error.get("code") in ("not_found", "model_not_found"):
        kind = "not_found_error"
    return {"type": "error", "error": {**error, "type": kind if kind in _ANTHROPIC_TYPES else "api_error"}}


def with_error_of(response: WireResponse, path: str) -> WireResponse:
    """Convert an error response to the format that clients of `path` expect; return others unchanged."""
    if response.status < 400 or not isinstance(response.body, bytes) or not path.startswith((_MESSAGES, _OLLAMA)):
        return response
    return replace(response, body=msgspec.json.encode(error_body(msgspec.json.decode(response.body)["error"], path)))


def new_id(prefix: str) -> str:
    """Return `prefix`, a hyphen and 24 random hexadecimal digits, such as `chatcmpl-5f0c…`."""
    return f"{prefix}-{secrets.token_hex(12)}"
