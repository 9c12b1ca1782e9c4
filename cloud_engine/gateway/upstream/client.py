"""The gateway's HTTP client: a bounded connection pool per node, so that a slow node does not affect others.

Proxy settings of the environment are ignored.
"""

from __future__ import annotations

import hmac
import re
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property

from ....protocol.errors import ConfigurationError, InvalidRequestError
from ....protocol.http.access import key_proof
from ....protocol.safety.redaction import SHORTEST_KEY, is_sendable
from .connection import ClosedUnansweredError, NodeConnection, SilenceTimeouts
from .failures import AnswerTooLargeError, UnreachableError
from .pool import Pool, PoolLimits, tls_context

JSON = b"application/json"
MAX_ANSWER_BYTES = 48 * 2**20  # bytes; answer and request body together stay below a tenant's memory limit
_ENDLESS = SilenceTimeouts()
_UNSENDABLE = re.compile(rb"[\0-\x08\x0a-\x20\x7f]")

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class UpstreamAddress:
    scheme: bytes
    host: bytes
    port: int
    prefix: bytes
    # Authorization header from the URL's credentials or the node's own key; replaces the shared node key.
    authorization: bytes = field(default=b"", repr=False)
    # Whether the node may get the shared node key.
    gets_shared_key: bool = True
    # Whether each connection must check that nodes may register the address it connects to.
    is_registered: bool = False

    @property
    def authority(self) -> bytes:
        """The value of the `Host` header; an IPv6 address is in brackets."""
        host = b"[%b]" % self.host if b":" in self.host else self.host
        return b"%b:%d" % (host, self.port)


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    method: bytes
    # Path with the query, without the node's prefix.
    path: bytes
    # Request body of type `content_type`; may be empty.
    body: bytes = b""
    # Headers besides those for host, key and body.
    headers: Headers = ()
    content_type: bytes = JSON
    # Called when a connection is available, just before the request is sent.
    on_sent: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Response:
    """A response whose status and headers have arrived."""

    status: int
    # Headers; names are in lower case.
    headers: Headers
    # Limits on the node's silence.
    timeouts: SilenceTimeouts
    _connection: NodeConnection
    # The whole body, if it was read already.
    body: bytes | None = None

    def read(self) -> Awaitable[bytes]:
        """Return the next bytes of the body; empty at the end. Raises UpstreamFailure if the connection breaks."""
        return self._connection.read()

    def wait_for_body(self) -> Awaitable[None]:
        """Wait until `read` has data or the body ends. Raises UpstreamFailure."""
        return self._connection.wait_for_body()

    async def read_whole(self, hold: Callable[[int], None] = lambda _: None) -> bytes:
        """Return the whole body. `hold` gets each piece's size. Raises UpstreamFailure or AnswerTooLargeError."""
        if self.body is not None:
            return self.body
        pieces, size = list[bytes](), 0
        while piece := await self._connection.read():
            pieces.append(piece)
            size += len(piece)
            if size > MAX_ANSWER_BYTES:
                raise AnswerTooLargeError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
            hold(len(piece))
        return b"".join(pieces)


class Upstream:
    """Connection pools for all nodes. `api_key`: the shared node key, if any."""

    def __init__(self, api_key: str | None, limits: PoolLimits | None = None) -> None:
        if api_key is not None and not is_sendable(api_key):
            raise ConfigurationError("UPDRAFT_NODE_API_KEY contains characters that are not allowed in a header.")
        if api_key and len(api_key) < SHORTEST_KEY:
            raise ConfigurationError(f"UPDRAFT_NODE_API_KEY must have at least {SHORTEST_KEY} characters.")
        self._api_key = api_key or ""
        self._limits = limits or PoolLimits()
        self._pools: dict[UpstreamAddress, Pool] = {}

    def is_proven(self, url: str, proof: str) -> bool:
        """Return whether `proof` was made with the shared node key, for this URL."""
        return bool(self._api_key) and hmac.compare_digest(key_proof(self._api_key, url).encode(), proof.encode())

    async def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def key_remover(self, target: UpstreamAddress) -> Callable[[bytes], bytes]:
        """Return a function that removes the node's key from a text: some servers quote a rejected key in the error."""
        key = self._authorization_for(target).partition(b" ")[2]
        return lambda body: body.replace(key, b"[the node's key]") if key else body

    async def get(self, target: UpstreamAddress, path: bytes) -> tuple[int, bytes]:
        """Send a GET request, and return the status and body. Raises UpstreamFailure."""
        async with self.open(target, UpstreamRequest(b"GET", path)) as response:
            return response.status, await response.read_whole()

    def last_heard(self, target: UpstreamAddress) -> float:
        """Return the time at which the node last sent anything, by `time.monotonic()`."""
        return self._pool(target).heard_at

    def give_up(self, target: UpstreamAddress, reason: str) -> None:
        """Fail all requests in flight on the node with UpstreamFailure, after the data received so far."""
        self._pool(target).give_up(reason)

    @asynccontextmanager
    async def open(
        self, target: UpstreamAddress, request: UpstreamRequest, timeouts: SilenceTimeouts = _ENDLESS
    ) -> AsyncGenerator[Response]:
        """Send a request and yield the response once its headers arrive. Raises UpstreamFailure or OverloadedError."""
        pool = self._pool(target)
        payload = self._payload(target, request)
        connection = await pool.acquire()
        request.on_sent()
        try:
            while True:
                try:
                    status, headers = await connection.request(payload, timeouts)
                    break
                except ClosedUnansweredError as closed:
                    if not connection.idle_since:
                        raise
                    try:
                        connection = await pool.exchange(connection)  # the node had closed the idle connection
                    except UnreachableError:
                        raise closed from None  # the node is down, and may have received the request
            yield Response(status, headers, timeouts, connection)
        finally:
            pool.release(connection)

    def _payload(self, target: UpstreamAddress, request: UpstreamRequest) -> bytes:
        headers = [(b"host", target.authority), *request.headers]
        if authorization := self._authorization_for(target):
            headers.append((b"authorization", authorization))
        if body := request.body:
            headers += [(b"content-type", request.content_type), (b"content-length", b"%d" % len(body))]
        target_path = target.prefix + request.path
        if _UNSENDABLE.search(target_path + b"".join([value for _, value in headers[1:]]).replace(b" ", b"")):
            raise InvalidRequestError("The query or a header contains characters that are not allowed in HTTP.")
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (request.method, target_path, lines, body)

    def _authorization_for(self, target: UpstreamAddress) -> bytes:
        shared = b"Bearer " + self._api_key.encode() if self._api_key and target.gets_shared_key else b""
        return target.authorization or shared

    def _pool(self, target: UpstreamAddress) -> Pool:
        if (pool := self._pools.get(target)) is None:
            context = self._context if target.scheme == b"https" else None
            pool = self._pools[target] = Pool(
                target.host.decode(), target.port, context, self._limits, is_registered=target.is_registered
            )
        return pool

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return tls_context()
