"""The server that the setting `local` names, and whether it is on the device."""

from __future__ import annotations

import ipaddress
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
    """A server of models, with an OpenAI-compatible API."""

    url: str
    # None: the only model that it has.
    model: str | None = None


def server_address(local: str | None, model: str | None = None) -> ServerAddress | None:
    """The server that `local` names: `ollama:MODEL`, or a URL; None where it is a model file. `model`: at a URL.

    Raises ConfigurationError.
    """
    if local is None:
        return None
    if local.startswith("ollama:"):
        name = local.removeprefix("ollama:")
        if not name:
            raise ConfigurationError("local must name a model after ollama:, as in ollama:qwen3.", param="local")
        return ServerAddress(f"http://127.0.0.1:{OLLAMA_PORT}/v1", name)
    if not local.startswith(("http://", "https://")):
        return None
    try:
        parsed = httpx.URL(local)
        _ = parsed.host  # is decoded only now
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigurationError(f"local {shown_url(local)!r} is not a URL.", param="local") from error
    if not parsed.host or parsed.userinfo or parsed.query or parsed.fragment:
        raise ConfigurationError(
            f"local {shown_url(local)!r} must be a URL of host, port and path: name the model with local_model, and "
            "give no credentials.",
            param="local",
        )
    path = parsed.path.rstrip("/") or "/v1"
    return ServerAddress(str(parsed.copy_with(path=path)), model)


def check_private(address: ServerAddress) -> None:
    """Raises ConfigurationError for a server that is not on this machine or in its private network.

    What privacy rules keep on the device goes there. A name may lead anywhere tomorrow, so only addresses count.
    """
    host = httpx.URL(address.url).host
    if not is_private(host):
        raise ConfigurationError(
            f"local names {shown_url(address.url)}, and {host} is no loopback or private address: what privacy rules "
            "keep on this device would be sent there. Name the server by its address, make it the cloud (cloud_url), "
            "or set local_public=true if you trust it as you trust this device.",
            param="local",
        )


def is_private(host: str) -> bool:
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in network for network in _PRIVATE)
