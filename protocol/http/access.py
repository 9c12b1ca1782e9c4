"""Access control: checks of the Host and Origin headers, of the API key, and of the local user; connection limits.

Browsers let any web page send requests to this machine. A page whose own name resolves to this machine (DNS rebinding)
can even read the responses. Such requests carry the page's name as Host or Origin.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Protocol

from starlette.types import Scope

from ..errors import AuthenticationError, ConfigurationError, InvalidRequestError, PermissionDeniedError
from ..safety.system import connection_user, own_user, raise_descriptor_limit

#: Key of the connection's `PeerUser` in the request's state.
PEER = "updraft.peer"

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/@\\\[\]]+))(?::[0-9]*)?")
#: An origin such as `https://app.example`. For schemes other than http(s), `app://` or `app://*` means all origins.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/@\\*]+|(?!https?:)[a-z][a-z0-9+.-]*://\*?")
_BEARER = re.compile(r"\Abearer ", re.IGNORECASE)
_MOST = 10_000
_RESERVED = 128  # descriptors for files, databases and libraries


@dataclass(frozen=True)
class PeerUser:
    """Client of a connection. The user behind the client is looked up once, at the first request that needs to know."""

    client: tuple[str, int] | None
    # Address of this server; the port is None for a Unix socket.
    server: tuple[str, int | None] | None

    @cached_property
    def is_other_user(self) -> bool:
        """Return whether another local user, except root, opened the connection; False if the system cannot tell."""
        own = own_user()
        if own is None or self.client is None or self.server is None or self.server[1] is None:
            return False
        return connection_user(self.client, (self.server[0], self.server[1])) not in (None, 0, own)


@dataclass(frozen=True, slots=True)
class Access:
    """Access rules, checked before the rest of a request is processed."""

    # Allowed Host names without a port, in addition to loopback and the server's own address.
    allowed_hosts: tuple[str, ...] = ()
    # Origins of web pages that may use this server, besides this machine's. `app://*`: all origins of the scheme.
    allowed_origins: tuple[str, ...] = ()
    # Required key, sent as a bearer token or as Anthropic's `x-api-key`. None: no key is required.
    api_key: str | None = field(default=None, repr=False)
    # Paths that need no key.
    public_paths: tuple[str, ...] = ("/health",)
    # Advice in the error for other users of this machine, who are refused. Empty: no user is refused.
    own_user: str = ""
    # Key of the operator for `admin_paths`, which accept no other key. None: these paths are refused.
    admin_key: str | None = field(default=None, repr=False)
    admin_paths: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for host in self.allowed_hosts:
            if _address_of(host) is None and (_host_of(host) != host or "*" in host):
                raise ConfigurationError(
                    f"allowed_hosts: {host!r} must be one name or address, without a port or *.", param="allowed_hosts"
                )
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin.lower()):
                raise ConfigurationError(
                    f"allowed_origins: {origin!r} must be an origin such as https://app.example, without a path, or a "
                    "scheme of desktop apps or extensions such as app://.",
                    param="allowed_origins",
                )

    @property
    def origin_pattern(self) -> str:
        """Regular expression of the allowed origins."""
        origins = (origin.lower().removesuffix("*") for origin in self.allowed_origins)
        return "|".join(re.escape(origin) + (".+" if origin.endswith("://") else "") for origin in origins)

    def check(self, scope: Scope) -> None:
        """Check a request. Raises PermissionDeniedError (Host, Origin or user) or AuthenticationError (key)."""
        sent: dict[bytes, list[str]] = {}
        for name, value in scope["headers"]:
            sent.setdefault(name, []).append(value.decode("latin-1"))
        address = (scope.get("server") or ("", 0))[0] or ""
        hosts = [host.lower() for host in sent.get(b"host", [""])]
        for host in hosts:
            if not self._is_own_host(_host_of(host), address.lower()):
                raise PermissionDeniedError(
                    f"The Host {host[:100]!r} is not allowed: to allow it, set allowed_hosts (--allowed-hosts)."
                )
        for origin in sent.get(b"origin", ()):
            if not self._may_ask(origin.lower(), hosts):
                raise PermissionDeniedError(
                    f"Web pages of {origin[:100]!r} may not use this server: "
                    "to allow them, set allowed_origins (--allowed-origins)."
                )
        key = _key_in(sent)
        if scope["path"] in self.public_paths:
            return
        if self.own_user and (peer := scope.get("state", {}).get(PEER)) is not None and peer.is_other_user:
            raise PermissionDeniedError(
                f"This server has no API key, so it serves only the user who started it: {self.own_user}.",
                code="other_user",
            )
        is_admin = scope["path"] in self.admin_paths
        if is_admin and self.admin_key is None:
            raise PermissionDeniedError("This server has no admin key: start it with UPDRAFT_NODE_ADMIN_KEY set.")
        required = self.admin_key if is_admin else self.api_key
        if required is not None and not hmac.compare_digest(key.encode("latin-1"), required.encode()):
            raise AuthenticationError("The API key is missing or wrong: send it as Authorization: Bearer KEY.")

    def _is_own_host(self, host: str, address: str) -> bool:
        """Return whether `host` names this server or is the socket's `address`, which DNS rebinding cannot fake."""
        if not host:
            return False
        if is_loopback(host) or host == address or host in (each.lower() for each in self.allowed_hosts):
            return True
        return _address_of(host) is not None and not is_loopback(address)

    def _may_ask(self, origin: str, hosts: list[str]) -> bool:
        if self.allowed_origins and re.fullmatch(self.origin_pattern, origin):
            return True
        scheme, _, authority = origin.partition("://")
        return scheme in ("http", "https") and (is_loopback(_host_of(authority)) or authority in hosts)


def _key_in(sent: dict[bytes, list[str]]) -> str:
    """Return the request's API key; empty without a key. Authorization has priority over `x-api-key`, since Anthropic's
    clients send both if both of their variables are set. Raises InvalidRequestError for two different keys in one
    header, because servers differ in which of the two they charge."""
    api_key = ""
    for name in (b"x-api-key", b"authorization"):
        keys = {_BEARER.sub("", value).strip() for value in sent.get(name, ())} - {""}
        if len(keys) > 1:
            fault = f"The request names two API keys in the header {name.decode()}. Send only one."
            raise InvalidRequestError(fault, param=name.decode(), code="invalid_value")
        api_key = next(iter(keys), api_key)
    return api_key


def key_proof(key: str, url: str) -> str:
    """Return the HMAC with which a node at `url` proves to a gateway that the node knows the shared key."""
    return hmac.new(key.encode(), b"updraft-node " + url.encode(), "sha256").hexdigest()


@lru_cache(256)
def _address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return `host` as an IP address; None if `host` is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether `host` is an address that only this machine can reach."""
    address = _address_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def host_is_loopback(authority: str) -> bool:
    """Return whether a Host header, with or without a port, names loopback."""
    return is_loopback(_host_of(authority.lower()))


def check_keyless(host: str, advice: str) -> None:
    """Check that a server without API key is on loopback, even if `host` is a name. Raises ConfigurationError."""
    if not (is_loopback(host) and _resolves_to_loopback(host)):
        raise ConfigurationError(f"--host {host} would let other machines in without a key: {advice}.", param="host")


def _resolves_to_loopback(host: str) -> bool:
    try:
        addresses = socket.getaddrinfo(host, None)
    except OSError:  # the name cannot be resolved, so no server can listen on it
        return True
    return all(is_loopback(str(address[0])) for *_, address in addresses)


def _host_of(authority: str) -> str:
    """Return the name or address in `name:port`; empty if malformed."""
    match = _HOST.fullmatch(authority)
    return "" if match is None else match[1] or match[2]


class LimitedConnection(Protocol):
    def close_now(self) -> None: ...


class ConnectionLimits:
    """Registry of open connections. At a limit, the connection that has been idle longest is closed."""

    def __init__(self, total: int, per_address: int) -> None:
        self._total = total
        self._per_address = per_address
        self._addresses: dict[LimitedConnection, str] = {}
        self._counts: Counter[str] = Counter()
        self._resting: dict[str, dict[LimitedConnection, None]] = {}
        self._all_resting: dict[LimitedConnection, None] = {}

    def admit(self, connection: LimitedConnection, address: str) -> bool:
        """Register a new, idle connection. Returns False if a limit is reached and no connection is idle."""
        # A reverse proxy on this machine may need many connections, so loopback has no limit per address.
        if self._counts[address] >= self._per_address and not is_loopback(address):
            self._close_oldest(self._resting.get(address, {}))
            if self._counts[address] >= self._per_address:
                return False
        if len(self._addresses) >= self._total:
            self._close_oldest(self._all_resting)
            if len(self._addresses) >= self._total:
                return False
        self._addresses[connection] = address
        self._counts[address] += 1
        self.mark_idle(connection)
        return True

    def mark_busy(self, connection: LimitedConnection) -> None:
        self._all_resting.pop(connection, None)
        if (address := self._addresses.get(connection)) is not None and address in self._resting:
            self._resting[address].pop(connection, None)
            if not self._resting[address]:
                del self._resting[address]

    def mark_idle(self, connection: LimitedConnection) -> None:
        """Mark a connection as idle, which means that it waits for a request or for the rest of a request."""
        if (address := self._addresses.get(connection)) is not None:
            self._all_resting[connection] = None
            self._resting.setdefault(address, {})[connection] = None

    def forget(self, connection: LimitedConnection) -> None:
        self.mark_busy(connection)
        if (address := self._addresses.pop(connection, None)) is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def _close_oldest(self, resting: dict[LimitedConnection, None]) -> None:
        if resting:
            oldest = next(iter(resting))
            self.forget(oldest)
            oldest.close_now()


def usual_limits() -> ConnectionLimits:
    """Raise the limit of file descriptors. Return connection limits that leave half of them to outgoing connections."""
    total = min(_MOST, (raise_descriptor_limit(2 * _MOST + _RESERVED) - _RESERVED) // 2)
    return ConnectionLimits(max(total, 8), max(total // 2, 4))
