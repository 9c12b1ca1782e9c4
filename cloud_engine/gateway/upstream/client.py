"""The gateway's pooled HTTP client: httpcore, the layer under httpx, which costs a third of it per request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpcore

from ....protocol.errors import ConfigurationError
from ....protocol.safety.redaction import is_sendable

_CONNECT_S = 1.0
_KEEPALIVE_S = 4.0  # below the 5 s after which uvicorn, unasked, closes an idle connection
_POOL = 4096

Headers = Sequence[tuple[bytes, bytes]]
Response = httpcore.Response


class UpstreamFailure(Exception):
    """The node could not be reached, or the connection to it broke."""


@dataclass(frozen=True, slots=True)
class UpstreamAddress:
    scheme: bytes
    host: bytes
    port: int
    prefix: bytes
    # What the address holds as user and password, for the header; it goes before the key of all nodes.
    authorization: bytes = field(default=b"", repr=False)

    @property
    def authority(self) -> bytes:
        """For the `Host` header: an IPv6 address stands in brackets there."""
        host = b"[%b]" % self.host if b":" in self.host else self.host
        return b"%b:%d" % (host, self.port)

    def url(self, path: bytes) -> httpcore.URL:
        return httpcore.URL(scheme=self.scheme, host=self.host, port=self.port, target=self.prefix + path)


class Upstream:
    """Connections to all nodes. `api_key`: what the nodes want as a key, if anything."""

    def __init__(self, api_key: str | None) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=_POOL, max_keepalive_connections=_POOL, keepalive_expiry=_KEEPALIVE_S
        )
        if api_key is not None and not is_sendable(api_key):
            raise ConfigurationError("UPDRAFT_NODE_API_KEY holds characters that no header can: set it anew.")
        self._authorization = b"Bearer " + api_key.encode() if api_key else b""

    async def close(self) -> None:
        await self._pool.aclose()

    def key_remover(self, target: UpstreamAddress) -> Callable[[bytes], bytes]:
        """Makes a node's answer fit for others: some quote the key that they refuse."""
        key = self._authorization_for(target).partition(b" ")[2]
        return lambda body: body.replace(key, b"[the node's key]") if key else body

    def _authorization_for(self, target: UpstreamAddress) -> bytes:
        return target.authorization or self._authorization

    async def get(self, target: UpstreamAddress, path: bytes) -> tuple[int, bytes]:
        """Status and body. Raises UpstreamFailure."""
        async with self.open("GET", target, path) as response:
            return response.status, b"".join([chunk async for chunk in body_of(response)])

    @asynccontextmanager
    async def open(
        self, method: str, target: UpstreamAddress, path: bytes, body: bytes = b"", extra: Headers = ()
    ) -> AsyncGenerator[httpcore.Response]:
        """The response once its headers are here; read it with `body_of`. `extra` headers. Raises UpstreamFailure."""
        headers = [(b"host", target.authority), *extra]
        if authorization := self._authorization_for(target):
            headers.append((b"authorization", authorization))
        if body:
            headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        request = httpcore.Request(
            method, target.url(path), headers=headers, content=body, extensions={"timeout": {"connect": _CONNECT_S}}
        )
        try:
            response = await self._pool.handle_async_request(request)
        except _FAILURES as error:
            raise UpstreamFailure(_message_of(error)) from error
        try:
            yield response
        finally:
            await response.aclose()


async def body_of(response: httpcore.Response) -> AsyncGenerator[bytes]:
    """Its chunks as they come. Raises UpstreamFailure if the connection breaks."""
    try:
        async for chunk in response.aiter_stream():
            yield chunk
    except _FAILURES as error:
        raise UpstreamFailure(_message_of(error)) from error


_FAILURES = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)


def _message_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
