"""TLS of a server: its handshakes, its certificate, read again when it changes, and when plain HTTP will do."""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from uvicorn.protocols.utils import get_remote_addr

from ..errors import ConfigurationError
from .access import is_loopback
from .connection import Connection
from .connection_limits import ConnectionLimits

HANDSHAKE_S = 10.0
_UNREAD = 2**16  # bytes of a connection on which nothing is read; asyncio would take eight times as many
_log = logging.getLogger("updraft.http")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Both in PEM."""

    # The server's certificate, and those that it was signed with.
    certificate: Path
    # Its private key, without a passphrase.
    key: Path

    def context(self) -> ssl.SSLContext:
        """For a server, TLS 1.2 and later. Raises ConfigurationError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_passphrase)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigurationError(
                f"Cannot use {self.certificate} with {self.key} as certificate and key: {error}.", param="tls_cert"
            ) from error
        return context


class Certificate:
    """What new connections are shown: what the files hold now. A pair that does not fit is not taken."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ConfigurationError."""
        self._files, self._context, self._said = files, files.context(), ""
        self._seen: list[tuple[int, int]] = []  # of the files, when they were last taken

    def context(self) -> ssl.SSLContext:
        try:
            stats = [path.stat() for path in (self._files.certificate, self._files.key)]
            if (found := [(each.st_mtime_ns, each.st_ino) for each in stats]) != self._seen:
                self._context, self._seen, self._said = self._files.context(), found, ""
        except (OSError, ConfigurationError) as error:
            if str(error) != self._said:
                self._said = str(error)
                _log.error("The new certificate is not taken, and the old one stays: %s", error)
        return self._context


class Handshake(asyncio.Protocol):
    """What a connection is until TLS is agreed on. It counts from the beginning, and whoever fails is not told."""

    _early = b""  # sent together with the end of the handshake
    _is_encrypted = False

    def __init__(self, certificate: Certificate, limits: ConnectionLimits, **uvicorns: Any) -> None:
        self._certificate, self._limits = certificate, limits
        self._connections: set[Any] = uvicorns["server_state"].connections
        self._encrypted = partial(Connection, limits=limits, **uvicorns)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        client = get_remote_addr(transport)
        if not self._limits.admit(self, client[0] if client else ""):
            transport.abort()
            return
        self._connections.add(self)
        self._task = asyncio.create_task(self._agree())

    def data_received(self, data: bytes) -> None:
        if not self._is_encrypted:
            self._transport.abort()
            return
        self._early += data

    def close_now(self) -> None:
        self._transport.abort()

    shutdown = close_now  # uvicorn's name

    async def _agree(self) -> None:
        start_tls = asyncio.get_running_loop().start_tls
        encrypted: Any = None
        self._is_encrypted = True  # from here on nothing comes that is not
        try:
            encrypted = await start_tls(
                self._transport, self, self._certificate.context(), server_side=True, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as error:  # ssl.SSLError is one
            _log.debug("A TLS handshake failed: %s", error)
        finally:
            self._limits.forget(self)
            self._connections.discard(self)
        if encrypted is None or encrypted.is_closing():  # the client has gone, or had to make room
            self._transport.abort()
            return
        connection = self._encrypted()
        encrypted.set_read_buffer_limits(_UNREAD)
        encrypted.set_protocol(connection)
        connection.connection_made(encrypted, self._transport)
        if self._early:
            connection.data_received(self._early)


def check_encrypted(host: str, tls: TlsFiles | None, *, insecure: bool) -> None:
    """Keys and prompts reach others by TLS, unless somebody says otherwise, and its files can be used.

    Raises ConfigurationError.
    """
    if tls is not None:
        tls.context()
    elif not insecure and not is_loopback(host):
        raise ConfigurationError(
            f"--host {host} would take keys and prompts unencrypted: give --tls-cert and --tls-key, "
            "or --insecure where a TLS proxy or a private network protects them.",
            param="host",
        )


def _no_passphrase() -> str:
    raise ConfigurationError("The private key has a passphrase: give --tls-key a file without one.", param="tls_key")
