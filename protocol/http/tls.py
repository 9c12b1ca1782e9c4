"""TLS of a server: its certificate, which is read again when its files change, and when plain HTTP will do."""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigurationError
from .access import is_loopback

_POLL_S = 1.0
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

    def version(self) -> tuple[tuple[int, int], ...]:
        """Changes with the files. Raises OSError."""
        found = [path.stat() for path in (self.certificate, self.key)]
        return tuple((each.st_mtime_ns, each.st_ino) for each in found)


async def follow(files: TlsFiles, context: ssl.SSLContext) -> None:
    """Let new connections use what the files hold now, until cancelled. A pair that does not fit is not taken."""
    seen, said = None, ""
    while True:
        try:
            if (found := files.version()) != seen:
                files.context()  # the running one stays as it is if these do not fit
                context.load_cert_chain(files.certificate, files.key)
                seen, said = found, ""
        except (OSError, ConfigurationError) as error:
            if str(error) != said:
                said = str(error)
                _log.error("The new certificate is not taken, and the old one stays: %s", error)
        await asyncio.sleep(_POLL_S)


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
