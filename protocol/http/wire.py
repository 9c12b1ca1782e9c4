"""A request and a response as bytes: the seam between the router and whatever carries it.

The SDK's transports, the daemon's HTTP shell and the tests all speak these two types, so the cascade is written once
and knows nothing of sockets, httpx or ASGI.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

LONG_BODY = 2**16
T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class WireResponse:
    """An HTTP response without a socket: `body` is whole, or an async stream the carrier must exhaust or `aclose()`."""

    status: int
    headers: Mapping[str, str]
    body: bytes | AsyncIterator[bytes]

    @staticmethod
    def json(payload: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> WireResponse:
        return WireResponse(
            status, {"content-type": "application/json", **(headers or {})}, msgspec.json.encode(payload)
        )


async def off_event_loop(body: bytes, work: Callable[[], T]) -> T:
    """The result of `work`; for a long body it is computed in a thread, off the event loop."""
    return await asyncio.to_thread(work) if len(body) > LONG_BODY else work()
