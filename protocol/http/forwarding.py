"""Selection of the caller's headers and query parameters that are forwarded to a cloud or node.

Credentials and framing headers belong to one hop and are never forwarded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from ..errors import UnsupportedFeatureError

#: Forwarded headers: those of OpenAI and other providers, tracing headers, and custom `x-` headers.
FORWARDED = re.compile(
    r"openai-.+|anthropic-.+|helicone-.+|x-.+|http-referer|idempotency-key|traceparent|tracestate|baggage"
)
#: Headers that are not forwarded: HTTP framing, browsers' and proxies', openai's client details, Updraft's API key,
#: and the choice of a worker inside vLLM, SGLang or llm-d.
HOP_BY_HOP = re.compile(
    r"accept(-.+)?|access-control-.+|api-key|authorization|cache-control|cdn-.+|cf-.+|connection|content-.+|cookie2?|date"
    r"|dnt|expect|forwarded|from|host|http2-settings|if-.+|keep-alive|max-forwards|origin|pragma|priority|proxy-.+"
    r"|purpose|range|referer|sec-.+|te|trailer|transfer-encoding|true-client-ip|upgrade(-.+)?|user-agent|via|warning"
    r"|x-(amzn?|api-key|client-ip|cluster|data-parallel|envoy|forwarded|http-method-override|original|prefiller|real-ip"
    r"|request-id|smg|stainless|updraft)(-.+)?"
)
# Forwarded headers that identify a request or its trace. They differ even between equal requests.
_TRACING = re.compile(
    r"idempotency-key|traceparent|tracestate|baggage|x-(b3|cloud-trace|correlation|datadog|ot|trace)(-.+)?"
)
_CREDENTIAL = re.compile(r"auth|cookie|credential|csrf|key|passw|secret|session|token")
_KEYS = frozenset({"idempotency-key"})  # names that contain "key" but hold no credential
_MAX_NAME = 100


@dataclass(frozen=True, slots=True)
class NativeRequest:
    """A request as the caller wrote it. A cloud with the same API receives its unchanged parts untranslated."""

    # Name of the provider with this API.
    provider: str
    fields: Mapping[str, Any]
    # Headers that only this API has, by lower-case name.
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    # The chat request to which `fields` were translated. The router sets it.
    chat: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Forwarding:
    """Headers and query parameters to forward with a request."""

    # Header values by lower-case name.
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    # Query string without the question mark.
    query: str = ""
    # The caller's own API key for the cloud. None: the key in the settings.
    api_key: str | None = field(default=None, repr=False)
    # Retries of a failed call.
    retries: int = 2
    # Names of headers that are not forwarded because no cloud is known to evaluate them.
    dropped: tuple[str, ...] = ()
    # The untranslated request; None if no provider has its API.
    native: NativeRequest | None = field(default=None, repr=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the answer that name the dropped headers."""
        return tuple(f"header {name[:_MAX_NAME]}: not forwarded" for name in self.dropped)

    @property
    def answer_headers(self) -> dict[str, str]:
        """The headers on which an answer may depend, without identifiers of requests and traces."""
        return {name: value for name, value in self.headers.items() if not _TRACING.fullmatch(name)}

    @property
    def texts(self) -> list[str]:
        """Every header and query value, for the privacy scan."""
        pairs = parse_qsl(self.query, keep_blank_values=True)
        return [self.query, *self.headers, *self.headers.values(), *(text for pair in pairs for text in pair)]

    def target(self, path: str) -> str:
        """Return `path` followed by the query string, if any."""
        return f"{path}?{self.query}" if self.query else path


NOTHING = Forwarding()


def forwarded(headers: Mapping[str, str], query: str = "", api_key: str | None = None, retries: int = 2) -> Forwarding:
    """Select the headers and query parameters to forward. Drop unknown headers and headers that may hold credentials.
    Raises UnsupportedFeatureError naming a query parameter that may hold a credential."""
    passed: dict[str, str] = {}
    dropped: list[str] = []
    sent = {name.lower(): value for name, value in headers.items()}
    connection = ",".join(value for name, value in headers.items() if name.lower() == "connection")
    of_this_hop = {name.strip().lower() for name in connection.split(",")}
    for name, value in sent.items():
        if _is_hop_by_hop(name) or name in of_this_hop:
            continue
        if FORWARDED.fullmatch(name) and not may_open(name):
            passed[name] = value
        else:
            dropped.append(name)
    key, second_key = sent.get("authorization", "").split()[-1:], sent.get("x-api-key")
    if key and second_key and key != [second_key]:
        dropped.append("x-api-key")  # Authorization has priority
    for name, _ in parse_qsl(query, keep_blank_values=True) if query else ():
        if may_open(name.lower()):
            raise UnsupportedFeatureError(
                f"The query parameter {name[:_MAX_NAME]!r} is not passed on to a cloud: leave it out. Set the cloud's "
                "API key in the settings instead.",
                param=name[:_MAX_NAME],
            )
    return Forwarding(passed, query, api_key, retries, tuple(dropped))


@lru_cache(1024)
def _is_hop_by_hop(name: str) -> bool:
    return HOP_BY_HOP.fullmatch(name) is not None


def header_bytes(value: str) -> bytes:
    """Encode a header value as HTTP does, in Latin-1, or in UTF-8 if it has other characters."""
    return value.encode("latin-1" if max(value, default="") < "\u0100" else "utf-8")


def may_open(name: str) -> bool:
    """Return whether the name of a header or query parameter suggests that its value is a credential."""
    return name not in _KEYS and _CREDENTIAL.search(name) is not None
