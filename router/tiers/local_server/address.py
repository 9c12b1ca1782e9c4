"""Address of the model server in the setting `local`, and the check that the address is private."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass

import httpx

from ....protocol.errors import ConfigurationError
from ....protocol.safety.redaction import shown_url

OLLAMA_PORT = 11434
_PRIVATE = [
    ipaddress.ip_network(each)
    for each in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"),
        *("::1/128", "fc00::/7", "fe80::/10"),
    )
]


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of a model server with an OpenAI-compatible API."""

    url: str
    # Model name. None: the server's only model.
    model: str | None = None
    # Setting or environment variable that names the server.
    source: str = "local"


def server_address(local: str | None, model: str | None = None) -> ServerAddress | None:
    """Return the server in `local` (`ollama:MODEL` or a URL), or None for a model file. `model`: model name for a URL.
    `OLLAMA_HOST` sets the address of Ollama. Raises ConfigurationError."""
    if local is None:
        return None
    if local.startswith("ollama:"):
        name = local.removeprefix("ollama:")
        if not name:
            raise ConfigurationError("local must name a model after ollama:, for example ollama:qwen3.", param="local")
        host = os.environ.get("OLLAMA_HOST", "").strip(" \t\r\n\"'")
        return _checked(_ollama_url(host), host, name, "OLLAMA_HOST" if host else "local")
    return _checked(local, local, model, "local") if local.startswith(("http://", "https://")) else None


def _ollama_url(host: str) -> str:
    """Return the URL for `OLLAMA_HOST`, as Ollama reads it: each part of `scheme://host:port/path` is optional."""
    scheme, separator, rest = host.rpartition("://")
    port = {"http": "80", "https": "443"}.get(scheme, "") if separator else str(OLLAMA_PORT)
    rest, _, path = rest.partition("/")
    user, at, rest = rest.rpartition("@")
    if parts := re.fullmatch(r"(\[.*\]|[^:\[\]]*):([^:]*)", rest):
        rest, port = parts[1], parts[2] or port
    name = rest.strip("[]")
    name = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(name, name)  # wildcard addresses
    path = f"/{path}".rstrip("/")
    return f"{scheme or 'http'}://{user}{at}{f'[{name}]' if ':' in name else name}:{port}{path}/v1"


def checked_url(url: str) -> httpx.URL:
    """Parse a URL. Raises httpx.InvalidURL or ValueError if no client can use it."""
    parsed = httpx.URL(url)
    _ = parsed.host  # httpx reports an invalid host only here
    if (parsed.port or 0) > 65_535:
        raise ValueError("a port must be at most 65535")
    return parsed


def _checked(url: str, given: str, model: str | None, source: str) -> ServerAddress:
    """Validate the server's URL. `given`: the setting as written, for messages."""
    try:
        parsed = checked_url(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigurationError(f"{source} {shown_url(given)!r} is not a URL.", param="local") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo or parsed.query or parsed.fragment:
        raise ConfigurationError(
            f"{source} {shown_url(given)!r} must be a URL of host, port and path. Name the model with local_model and "
            "omit credentials.",
            param="local",
        )
    path = parsed.path.rstrip("/") or "/v1"
    return ServerAddress(str(parsed.copy_with(path=path)), model, source)


def check_private(address: ServerAddress) -> None:
    """Raise ConfigurationError if the server is not on this machine or in its private network. The server receives
    private prompts. Only localhost and IPs are accepted, since a name may resolve elsewhere later."""
    host = httpx.URL(address.url).host
    if not is_private(host):
        raise ConfigurationError(
            f"{address.source} names {shown_url(address.url)}, but {host} is not a private address: data that "
            "privacy rules keep on this device would be sent there. Name the server by IP address, make it the cloud "
            "(cloud_url), or set local_public=true if you trust it like this device.",
            param="local",
        )


def is_private(host: str) -> bool:
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in network for network in _PRIVATE)
