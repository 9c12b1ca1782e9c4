"""A bounded connection pool for one node; the most recently used idle connection is reused first."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import ssl
import time
from dataclasses import dataclass

from ....protocol.errors import OverloadedError
from .connection import NodeConnection
from .failures import UnreachableError, UpstreamFailure, UpstreamTimeout

OWN_STALL_S = 0.5  # seconds by which a timer may be late; beyond that, the gateway itself was stalled, not the node
_KEEPALIVE_S = 4.0  # seconds; less than uvicorn's default keep-alive timeout of 5 s
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The limits of one node's connection pool."""

    # Maximum connections; further requests wait.
    connections: int = 4096
    # Timeout for connecting, including the TLS handshake, in seconds.
    connect_s: float = 2.0


class Pool:
    """A connection pool with constant-time operations. `heard_at`: monotonic time at which the node last sent data."""

    def __init__(
        self, host: str, port: int, context: ssl.SSLContext | None, limits: PoolLimits, *, is_registered: bool = False
    ) -> None:
        self._host, self._port, self._context, self._limits = host, port, context, limits
        self._is_registered = is_registered
        self._idle: dict[NodeConnection, None] = {}
        self._busy: set[NodeConnection] = set()
        self._slots = asyncio.Semaphore(limits.connections)
        self.heard_at = 0.0

    async def acquire(self) -> NodeConnection:
        """Return an idle connection, or open one. Raises UpstreamFailure, or OverloadedError."""
        await self._slots.acquire()
        try:
            self._close_expired()
            connection = self._idle.popitem()[0] if self._idle else await self._connect()
        except BaseException:
            self._slots.release()
            raise
        self._busy.add(connection)
        return connection

    async def exchange(self, broken: NodeConnection) -> NodeConnection:
        """Replace a closed connection. If this raises an error of `acquire`, the caller must release `broken`."""
        connection = await self._connect()
        broken.close()
        self._busy.discard(broken)
        self._busy.add(connection)
        return connection

    def release(self, connection: NodeConnection) -> None:
        self._slots.release()
        self._busy.discard(connection)
        if connection.is_reusable:
            connection.rest()
            self._idle[connection] = None
        else:
            connection.close()

    def give_up(self, reason: str) -> None:
        """Fail the requests on all busy connections with UpstreamFailure."""
        for connection in self._busy:
            connection.fail(UpstreamFailure(reason))

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.popitem()[0].close()

    def _close_expired(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._idle and now - (oldest := next(iter(self._idle))).idle_since > _KEEPALIVE_S:
            del self._idle[oldest]
            oldest.close()

    async def _connect(self) -> NodeConnection:
        loop, limit_s = asyncio.get_running_loop(), self._limits.connect_s
        began = loop.time()
        try:
            async with asyncio.timeout(limit_s):
                transport, connection = await loop.create_connection(
                    lambda: NodeConnection(self._forget, self._note_data), self._host, self._port, ssl=self._context
                )
        except TimeoutError as error:
            if loop.time() - began > limit_s + OWN_STALL_S:
                return await self._connect()  # the node may have accepted in time
            raise UpstreamTimeout(f"the node accepted no connection within {limit_s:g} s") from error
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:  # a limit of the gateway, not a fault of the node
                raise OverloadedError("The gateway is out of file descriptors: try again shortly.") from error
            raise UnreachableError(f"{type(error).__name__}: {error}") from error
        if (peer := transport.get_extra_info("peername")) is None:  # the connection was reset immediately
            transport.abort()
            raise UnreachableError("the connection to the node was reset")
        if self._is_registered and not may_register(peer[0], is_local=is_literal_address(self._host)):
            transport.abort()  # the name now resolves to a forbidden address
            raise UnreachableError(f"nodes may not register the address {peer[0]}")
        return connection

    def _forget(self, connection: NodeConnection) -> None:
        self._idle.pop(connection, None)

    def _note_data(self) -> None:
        self.heard_at = time.monotonic()


def may_register(address: str, *, is_local: bool) -> bool:
    """Return whether a node may register this address. `is_local`: whether loopback addresses are allowed.

    Refused addresses could reach cloud metadata, or services of this machine that trust local callers.
    """
    ip = ipaddress.ip_address(address)
    ip = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None) or ip
    if ip.is_loopback:
        return is_local
    return not (ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved)


def is_literal_address(host: str) -> bool:
    """Return whether the host is an IP address or localhost, so that DNS cannot redirect it later."""
    try:
        return host == "localhost" or bool(socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST))
    except (OSError, UnicodeError):
        return False


def tls_context() -> ssl.SSLContext:
    """Return a context with the certificate authorities of the environment, or else certifi's."""
    import httpx  # not needed for nodes without TLS

    return httpx.create_ssl_context()
