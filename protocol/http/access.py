"""Whom a server lets in: the Host and Origin that a request may carry, and the key that it must.

A browser lets any web page send requests to this machine. A page whose own name is made to resolve to it (DNS
rebinding) may even read the answers. Such requests carry the page's name as Host or as Origin.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from starlette.types import Scope

from ..errors import AuthenticationError, ConfigurationError, PermissionDeniedError
from ..safety.system import connection_user, own_user

#: Key of the connection's `PeerUser` in the state of each request.
PEER = "updraft.peer"

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/@\\\[\]]+))(?::[0-9]*)?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/@\\]+")


@dataclass(frozen=True)
class PeerUser:
    """The client of a connection. Its user is looked up once, when a request first needs it."""

    client: tuple[str, int] | None
    # No port: a Unix socket.
    server: tuple[str, int | None] | None

    @cached_property
    def is_other_user(self) -> bool:
        """Whether a user of this machine other than ours and root sent it; False where the system does not tell."""
        own = own_user()
        if own is None or self.client is None or self.server is None or self.server[1] is None:
            return False
        return connection_user(self.client, (self.server[0], self.server[1])) not in (None, 0, own)


@dataclass(frozen=True, slots=True)
class Access:
    """Checked before anything else of a request is looked at."""

    # Names that callers may use for this server, without a port, beside those of loopback and its own address.
    allowed_hosts: tuple[str, ...] = ()
    # Origins whose web pages may use this server, beside those of this machine.
    allowed_origins: tuple[str, ...] = ()
    # The key that requests must carry, as a bearer token or as Anthropic's `x-api-key`. None: no key is asked for.
    api_key: str | None = field(default=None, repr=False)
    # These need none.
    public_paths: tuple[str, ...] = ("/health",)
    # Refuse other users of this machine, with this advice. Empty: serve all of them.
    own_user: str = ""

    def __post_init__(self) -> None:
        for host in self.allowed_hosts:
            if not _is_address(host) and _host_of(host) != host:
                raise ConfigurationError(
                    f"allowed_hosts: {host!r} must be a name or an address without a port.", param="allowed_hosts"
                )
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin.lower()):
                raise ConfigurationError(
                    f"allowed_origins: {origin!r} must be as browsers send it, like https://app.example.",
                    param="allowed_origins",
                )

    def check(self, scope: Scope) -> None:
        """Raises PermissionDeniedError for a foreign Host, Origin or user, AuthenticationError for a wrong key."""
        sent: dict[bytes, list[str]] = {}
        for name, value in scope["headers"]:
            sent.setdefault(name, []).append(value.decode("latin-1"))
        address = (scope.get("server") or ("", 0))[0] or ""
        hosts = [host.lower() for host in sent.get(b"host", [""])]
        for host in hosts:
            if not self._is_ours(_host_of(host), address.lower()):
                raise PermissionDeniedError(
                    f"This server is not called {host[:100]!r}: if it should be, set allowed_hosts (--allowed-host)."
                )
        for origin in sent.get(b"origin", ()):
            if not self._may_ask(origin.lower(), hosts):
                raise PermissionDeniedError(
                    f"Web pages of {origin[:100]!r} may not use this server: "
                    "if they should, set allowed_origins (--allowed-origin)."
                )
        if scope["path"] in self.public_paths:
            return
        if self.own_user and (peer := scope.get("state", {}).get(PEER)) is not None and peer.is_other_user:
            raise PermissionDeniedError(
                f"This server has no API key, so it serves only the user who started it: {self.own_user}.",
                code="other_user",
            )
        if self.api_key is not None:
            key = (sent.get(b"authorization") or sent.get(b"x-api-key") or [""])[0].removeprefix("Bearer ")
            if not hmac.compare_digest(key.encode("latin-1"), self.api_key.encode()):
                raise AuthenticationError("The API key is missing or wrong: send it as Authorization: Bearer KEY.")

    def _is_ours(self, host: str, address: str) -> bool:
        """`address`: where the connection came in, as the socket says. A name can be rebound, an address cannot."""
        if not host:
            return False
        if is_loopback(host) or host == address or host in (each.lower() for each in self.allowed_hosts):
            return True
        return _is_address(host) and not is_loopback(address)

    def _may_ask(self, origin: str, hosts: list[str]) -> bool:
        if origin in (each.lower() for each in self.allowed_origins):
            return True
        scheme, _, authority = origin.partition("://")
        return scheme in ("http", "https") and (is_loopback(_host_of(authority)) or authority in hosts)


def key_proof(key: str, url: str) -> str:
    """The proof that a node at `url` sends to a gateway: it knows the key of all nodes, and does not reveal it."""
    return hmac.new(key.encode(), b"updraft-node " + url.encode(), "sha256").hexdigest()


@lru_cache(256)
def is_loopback(host: str) -> bool:
    """Whether `host` is an address that only this machine can reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_is_loopback(authority: str) -> bool:
    """The same of a Host header, which may have a port."""
    return is_loopback(_host_of(authority.lower()))


def check_keyless(host: str, advice: str) -> None:
    """A server without a key serves this machine only, whatever a name stands for here. Raises ConfigurationError with
    what to do instead.
    """
    if not (is_loopback(host) and _stands_for_loopback(host)):
        raise ConfigurationError(f"--host {host} opens the port to others without a key: {advice}.", param="host")


def _stands_for_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:  # then nothing can listen there
        return True
    return all(is_loopback(str(address[0])) for *_, address in found)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _host_of(authority: str) -> str:
    """The name or address in `name:port`; empty if it is none."""
    found = _HOST.fullmatch(authority)
    return "" if found is None else found[1] or found[2]
