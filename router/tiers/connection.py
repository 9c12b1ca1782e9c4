"""HTTP client of one cloud, with the proxy and certificates that the environment sets for its URL."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookiejar import DefaultCookiePolicy
from urllib.request import getproxies

import httpx
import msgspec

from ...protocol.errors import ConfigurationError
from ...protocol.http.forwarding import may_open
from ...protocol.http.lenient_json import json_of
from ...protocol.safety.redaction import Redactor, is_sendable, shown_url
from .answer_shapes import ThoughtForm
from .providers.provider import OpenAIProvider, Provider

#: Header that replaces the `location` header in responses of clients from `open_client`.
LOCATION = "x-updraft-location"
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE")


@dataclass(frozen=True, slots=True)
class CloudEndpoint:
    """Address, credentials and time limits of a cloud."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    # Whether the cloud can continue the assistant's last message (`continue_final_message`).
    continues: bool = False
    # Seconds without a received byte after which a request fails.
    timeout_s: float = 60.0
    # Connect timeout in seconds.
    connect_timeout_s: float = 2.0
    # Whether to send drafts to a cloud that is not an Updraft node.
    send_drafts: bool = False
    # Provider that defines the cloud's API.
    provider: Provider = field(default_factory=OpenAIProvider)
    # Extra headers and extra query values to send with every request.
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    query: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    # Form of the reasoning in the cloud's messages.
    thoughts: ThoughtForm = field(default_factory=ThoughtForm, repr=False, compare=False)

    def redactor(self, callers_key: str | None) -> Redactor:
        """Return a redactor that hides the keys, and header and query values whose names suggest credentials."""
        named = [value for name, value in (*self.headers.items(), *self.query.items()) if may_open(name.lower())]
        parts = [value.rpartition(" ")[2] for value in named]  # in `Bearer KEY`, only `KEY`
        return Redactor(key for key in (self.api_key, callers_key, *named, *parts) if key)

    def redacted_error(self, raw: bytes, callers_key: str | None) -> bytes:
        """Return an error body with credentials redacted."""
        redactor = self.redactor(callers_key)
        try:
            return msgspec.json.encode(redactor.json(json_of(raw)))
        except RecursionError:
            return b""
        except ValueError:
            return redactor.text(raw.decode(errors="replace")).encode()

    def query_with(self, callers_key: str | None) -> Mapping[str, str]:
        """Return the query of a request. A caller's key replaces the credentials from the settings."""
        if callers_key is None:
            return self.query
        return {name: value for name, value in self.query.items() if not may_open(name.lower())}


def open_client(endpoint: CloudEndpoint) -> httpx.AsyncClient:
    """Return a pooled client, not yet connected. Raises ConfigurationError for a key that no header can carry, or an
    unusable proxy or certificate in the environment.
    """
    return _client(endpoint, _certificates(endpoint))


def check_endpoint(endpoint: CloudEndpoint) -> None:
    """Raise the errors of `open_client`, but skip loading the default certificates, which takes 0.1 s."""
    _client(endpoint, _certificates(endpoint) if any(map(os.environ.get, _CERTIFICATES)) else False)


def _certificates(endpoint: CloudEndpoint) -> ssl.SSLContext | bool:
    try:
        # Plain http needs no TLS context, and loading one takes 0.1 s.
        return httpx.create_ssl_context() if httpx.URL(endpoint.url).scheme == "https" else False
    except OSError as error:
        named = " and ".join(f"{name}={os.environ[name]}" for name in _CERTIFICATES if os.environ.get(name))
        raise ConfigurationError(
            f"The certificates for {endpoint.url} cannot be read ({error}). Fix {named or 'the installed certifi'}."
        ) from error


def _client(endpoint: CloudEndpoint, verify: ssl.SSLContext | bool) -> httpx.AsyncClient:
    key, url = endpoint.api_key, httpx.URL(endpoint.url)
    if key and not is_sendable(key):
        raise ConfigurationError(
            f"The API key for {url} contains a space, a line end or a non-ASCII character, which HTTP headers forbid. "
            "Copy it again.",
            param="cloud_api_key",
        )
    proxy = proxy_for(url)
    try:
        client = httpx.AsyncClient(
            headers={**endpoint.provider.headers(key), **endpoint.headers},
            timeout=httpx.Timeout(endpoint.timeout_s, connect=endpoint.connect_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            verify=verify,
            proxy=proxy,
            trust_env=False,  # httpx refuses to start for some values of NO_PROXY
            follow_redirects=False,  # a redirect would send the prompt to a host that is not in the settings
            event_hooks={"response": [_keep_location]},
        )
        client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=()))  # callers must not share cookies
        return client
    except (ValueError, ImportError, httpx.InvalidURL) as error:
        named = shown_url(proxy or "")
        detail = "pip install 'httpx[socks]'" if isinstance(error, ImportError) else "fix it"
        raise ConfigurationError(
            f"The proxy {named!r} from the environment is unusable for {url}: {detail}, or add {url.host} to NO_PROXY."
        ) from error


async def _keep_location(response: httpx.Response) -> None:
    """Rename the header, because httpx parses it even without following redirects and fails on invalid URLs."""
    if (target := response.headers.pop("location", None)) is not None:
        response.headers[LOCATION] = target


def proxy_for(url: httpx.URL) -> str | None:
    """Return the proxy in `HTTP_PROXY`, `HTTPS_PROXY` or `ALL_PROXY`, or None if `NO_PROXY` covers the host."""
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if not proxy or any(_covers(entry, url) for entry in re.split(r"[,\s]+", proxies.get("no", "")) if entry):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _covers(entry: str, url: httpx.URL) -> bool:
    """Return whether an entry of `NO_PROXY` names the host of `url`, a parent domain, or a network with the host."""
    scheme, _, entry = entry.rpartition("://")
    if entry == "*":
        return scheme in ("", "all", url.scheme)
    hosts = (url.host.lower(), url.raw_host.decode())  # Unicode and ASCII form of the name
    matched = re.fullmatch(r"\[(.*)\](?::(\d+))?|([^:]*):(\d+)|(.*)", entry.lower())
    if matched is None or scheme not in ("", "all", url.scheme):
        return False
    bracketed, port_6, name, port, plain = matched.groups()
    wanted = bracketed or name or plain or ""
    port = port_6 or port
    if port is not None and port != str(url.port or {"http": 80, "https": 443}[url.scheme]):
        return False
    try:
        return ipaddress.ip_address(hosts[0]) in ipaddress.ip_network(wanted, strict=False)
    except ValueError:  # the host or the entry is a name, not an IP address
        domain = wanted.removeprefix("*").lstrip(".")
        return bool(domain) and any(host == domain or host.endswith(f".{domain}") for host in hosts)
