"""Server-side TLS: handshakes, certificates reloaded on change, and the check that forbids unencrypted servers."""

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
from .access import ConnectionLimits, is_loopback
from .connection import Connection

HANDSHAKE_S = 10.0
_UNREAD = 2**16  # read buffer of a connection while reading is paused, in bytes; asyncio's default is 8 times larger
_log = logging.getLogger("updraft.http")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a server's certificate and key."""

    # Server certificate, followed by the intermediate certificates.
    certificate: Path
    # Private key of the certificate, without a passphrase.
    key: Path

    def context(self) -> ssl.SSLContext:
        """Load a server context for TLS 1.2 and later. Raises ConfigurationError if the files are unusable."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            for path in (self.certificate, self.key):
                path.open("rb").close()  # because errors of `load_cert_chain` do not name the file
            context.load_cert_chain(self.certificate, self.key, password=_no_passphrase)
        except ssl.SSLError as error:
            raise ConfigurationError(self._fault(error), param="ssl_certfile") from error
        except OSError as error:
            raise ConfigurationError(
                f"Cannot read {error.filename}: {error.strerror}.", param="ssl_certfile"
            ) from error
        return context

    def _fault(self, error: ssl.SSLError) -> str:
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"{self.key} is not the key of {self.certificate}: give --ssl-keyfile the key of this certificate."
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self.certificate)
        except ssl.SSLError:
            return f"{self.certificate} holds no valid certificate: give --ssl-certfile a PEM file."
        return f"{self.key} holds no valid private key: give --ssl-keyfile a PEM file."


class Certificate:
    """Certificate for new connections, reloaded when the files change. An unusable pair is logged and ignored."""

    def __init__(self, files: TlsFiles) -> None:
        """Load the files. Raises ConfigurationError if unusable."""
        self._files, self._context, self._said = files, files.context(), ""
        self._seen: list[tuple[int, int]] = []  # modification time and inode of each file at the last load

    def context(self) -> ssl.SSLContext:
        try:
            stats = [path.stat() for path in (self._files.certificate, self._files.key)]
            if (states := [(each.st_mtime_ns, each.st_ino) for each in stats]) != self._seen:
                self._context, self._seen, self._said = self._files.context(), states, ""
        except (OSError, ConfigurationError) as error:
            if str(error) != self._said:
                self._said = str(error)
                _log.error("Cannot load the new certificate, keeping the old one: %s", error)
        return self._context


class Handshake(asyncio.Protocol):
    """Protocol of a connection during the TLS handshake. Connection limits apply. Closes silently after a failure."""

    _early = b""  # decrypted data received before the handshake task resumes
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
        self._task = asyncio.create_task(self._handshake())

    def data_received(self, data: bytes) -> None:
        if not self._is_encrypted:
            self._transport.abort()
            return
        self._early += data

    def close_now(self) -> None:
        self._transport.abort()

    shutdown = close_now  # uvicorn's name for this method

    async def _handshake(self) -> None:
        start_tls = asyncio.get_running_loop().start_tls
        encrypted: Any = None
        self._is_encrypted = True  # from here on, `data_received` only gets decrypted data
        try:
            encrypted = await start_tls(
                self._transport, self, self._certificate.context(), server_side=True, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as error:  # includes ssl.SSLError
            _log.debug("TLS handshake failed: %s", error)
        finally:
            self._limits.forget(self)
            self._connections.discard(self)
        if encrypted is None or encrypted.is_closing():  # the handshake failed, or the connection was closed meanwhile
            self._transport.abort()
            return
        connection = self._encrypted()
        encrypted.set_read_buffer_limits(_UNREAD)
        encrypted.set_protocol(connection)
        connection.connection_made(encrypted, self._transport)
        if self._early:
            connection.data_received(self._early)


def check_encrypted(host: str, tls: TlsFiles | None, *, insecure: bool) -> None:
    """Check that `tls` is usable, or else that the server is on loopback or `insecure`. Raises ConfigurationError."""
    if tls is not None:
        tls.context()
    elif not insecure and not is_loopback(host):
        raise ConfigurationError(
            f"--host {host} would receive keys and prompts unencrypted: give --ssl-certfile and --ssl-keyfile, "
            "or --insecure if a TLS proxy or a private network protects the traffic.",
            param="host",
        )


def _no_passphrase() -> str:
    raise ConfigurationError("The key of --ssl-keyfile has a passphrase: use a key without one.", param="ssl_keyfile")
