"""HTTP client of one cloud, with the proxy and certificates of the environment, and the cloud's streamed answers."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.cookiejar import DefaultCookiePolicy
from types import MappingProxyType
from typing import Any
from urllib.request import getproxies

import httpx
import msgspec

from ...accounting.reported_usage import ReportedUsage
from ...protocol.errors import ConfigurationError
from ...protocol.http import sse
from ...protocol.http.forwarding import may_open
from ...protocol.http.lenient_json import json_bytes, json_of, object_of, on_one_line, table, tables
from ...protocol.safety.redaction import Redactor, is_sendable, shown_url
from .answer_shapes import Continuation, ContinuationVerdict, StreamedChoices, ThoughtForm, has_content, is_piece
from .failures import cut, invalid_answer, timed_out
from .providers.provider import OpenAIProvider, Provider

#: Header that replaces the `location` header in responses of clients from `open_client`.
LOCATION = "x-updraft-location"
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE")
_NO_STREAM = "the server answered a streamed request with something other than an event stream"
_LAST_BYTES_S = 0.2  # seconds that a server has to end its response after the end mark


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


class HttpCloudStream(AsyncIterator[tuple[bytes, dict[str, Any]]]):
    """`CloudStream` over one open response of a cloud."""

    def __init__(
        self,
        response: httpx.Response,
        endpoint: CloudEndpoint,
        callers_key: str | None = None,
        *,
        request: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Read `response`. `callers_key`: the key sent with the request, if it is not the key in the settings.
        `request`: body of the chat request."""
        self._callers_key = callers_key
        self._response = response
        self._endpoint = endpoint
        self._url = endpoint.url
        self._translator = endpoint.provider.events()
        self._chunks: AsyncIterator[bytes] = response.aiter_bytes()
        self._parser = sse.EventParser()
        self._choices = StreamedChoices(request)
        self._usage = ReportedUsage(has_completion=False)  # of all events so far
        self._payloads: deque[bytes] = deque()  # received but not yet decoded events
        self._ready: deque[tuple[bytes, dict[str, Any]]] = deque()
        self._kind: str = response.headers.get("content-type", "").lower()
        self._began = False  # whether an event has arrived
        self._finished = False  # whether a finish_reason has arrived, so that the stream may end

    async def wait_for_content(self) -> None:
        """Read until the answer has content. Before that, a local answer can still replace a failed stream."""
        if self._kind.startswith(("application/json", "text/html")):
            raise invalid_answer(self._url, _NO_STREAM)
        held: deque[tuple[bytes, dict[str, Any]]] = deque()
        async for event in self:
            held.append(event)
            if has_content(event[1]):
                break
        else:
            raise invalid_answer(self._url, "the stream ended before any content")
        held.extend(self._ready)
        self._ready = held

    async def check_continuation(self, begun: str) -> ContinuationVerdict:
        """Read until it is known whether the stream continues `begun`, and drop a repetition of `begun`."""
        continuation = Continuation(begun)
        verdict: ContinuationVerdict = "unknown"
        async for event in self:
            if (verdict := continuation.take(event)) != "unknown":
                break
        self._ready = continuation.events + self._ready
        return verdict

    async def __anext__(self) -> tuple[bytes, dict[str, Any]]:
        while not self._ready:
            if self._payloads:
                self._ready.extend(self._read(self._payloads.popleft()))
                continue
            if self._parser.done:
                if (finish := self._choices.finish()) is None:
                    raise StopAsyncIteration
                return json_bytes(finish), finish
            try:
                async with asyncio.timeout(self._endpoint.timeout_s):
                    chunk = await anext(self._chunks, None)
            except TimeoutError as error:
                raise timed_out(self._url, self._endpoint.timeout_s) from error
            except httpx.HTTPError as error:
                raise cut(self._url, str(error) or type(error).__name__) from error
            if chunk is None:
                if self._finished:
                    raise StopAsyncIteration
                if not (self._began or self._kind.startswith("text/event-stream")):
                    raise invalid_answer(self._url, _NO_STREAM)
                raise cut(self._url, "no finish reason arrived")
            try:
                self._payloads.extend(self._parser.feed(chunk))
            except sse.EventTooLongError as error:
                raise invalid_answer(self._url, "the stream has an event that does not end") from error
            self._began = self._began or bool(self._payloads)
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Close the stream. After the end mark, first read the rest, so that the connection can be reused."""
        if self._parser.done:
            with suppress(TimeoutError, httpx.HTTPError):
                async with asyncio.timeout(_LAST_BYTES_S):
                    while await anext(self._chunks, None) is not None:
                        pass
        await self._response.aclose()

    def _read(self, payload: bytes) -> list[tuple[bytes, dict[str, Any]]]:
        try:
            event = table(self._endpoint.provider.read(payload))
        except ValueError as error:
            raise invalid_answer(self._url, "the stream has an event that is not JSON") from error
        if event is not None and event.get("error"):
            raise self._endpoint.provider.reported(
                self._url, self._endpoint.redactor(self._callers_key).json(event["error"])
            )
        if event is None:
            raise invalid_answer(self._url, "the stream has an event that is not an object")
        if self._translator is None:
            return [self._checked(payload, event)]
        self._parser.done = self._parser.done or event.get("type") == self._endpoint.provider.end_event
        return [self._checked(json_bytes(chunk), chunk) for chunk in self._translator(event)]

    def _checked(self, payload: bytes, event: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
        if event.get("choices") is None:  # a keep-alive event, or on some servers the usage
            event["choices"] = []
            payload = json_bytes(event)
        choices = tables(event["choices"])
        if choices is None:
            raise invalid_answer(self._url, "the stream has an event with invalid choices")
        is_changed = self._choices.unfold(event)
        if not all(is_piece(choice) for choice in choices):
            raise invalid_answer(self._url, "the stream has a choice that is not part of a message")
        self._finished = self._finished or any(choice.get("finish_reason") for choice in choices)
        is_changed |= self._choices.normalize(event)
        for choice in choices:
            is_changed |= self._endpoint.thoughts.read(object_of(choice.get("delta")))
        if b"sage" in payload and (usage := ReportedUsage.of(event)) is not None:
            self._usage = usage.after(self._usage) if usage else self._usage  # some clouds end with zeros
            given = event.get("usage")
            if self._usage.prompt_tokens and (shown := self._usage.standard(given)) != given:
                event["usage"], is_changed = shown, True
        payload = json_bytes(event) if is_changed else payload
        return on_one_line(payload), event
