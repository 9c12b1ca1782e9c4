"""Checks of the API keys and URLs in the requests of an openai client."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..protocol.errors import InvalidRequestError
from ..protocol.safety.redaction import is_sendable

BASE_URL = "http://updraft.invalid/v1"  # never resolved, because the transport answers
#: Key for openai's constructor, which requires one. The in-process router needs none.
PLACEHOLDER_KEY = "updraft-in-process"
_OTHER_HEADERS = ("x-api-key", "api-key")
_OPENAI_HEADER = "x-stainless-lang"  # header that openai's methods add to every request


@dataclass(frozen=True, slots=True)
class CallerKeys:
    """Rules for API keys in requests. By default, a key only identifies the caller and is not sent to a cloud."""

    # Keys to replace by the key in the settings. None: every key.
    own: frozenset[str] | None = field(default=None, repr=False)
    # Whether to refuse requests to other URLs than `BASE_URL`.
    checks_url: bool = False

    def check_url(self, url: Any) -> None:
        """Raise InvalidRequestError if `url`, a URL of httpx or httpx2, names a server other than the router."""
        if self.checks_url and f"{url.scheme}://{url.netloc.decode()}/v1" != BASE_URL:
            raise InvalidRequestError(
                "base_url belongs to the router. Set cloud_url in a separate client instead.",
                param="base_url",
                code="unsupported_parameter",
            )

    def named_in(self, headers: Mapping[str, str], authorizations: Iterable[str]) -> str | None:
        """Return the request's own API key, or None to use the key in the settings. `headers` have lower-case names.

        `authorizations`: all values of the Authorization header; openai 2 may send the client's value and the caller's.
        Raises InvalidRequestError for two different keys, for a header without a key, and for a request from which the
        caller removed openai's Authorization header. Requests that openai's methods did not send need no key.
        """
        if self.own is None:
            return None
        for name in headers:
            if name.endswith("api-key") and name not in _OTHER_HEADERS:
                raise _refused(name, f"The header {name!r} is not supported for a key. Use Authorization.")
        keys = {headers[name]: name for name in _OTHER_HEADERS if name in headers}
        for value in authorizations:
            scheme, _, key = value.partition(" ")
            keys[key.strip() if scheme.lower() == "bearer" else ""] = "authorization"
        if not keys and _OPENAI_HEADER in headers:  # openai's methods send a key unless the caller removes it
            raise _refused("authorization", "The header 'authorization' is missing: this request has no API key.")
        named = {key: name for key, name in keys.items() if key not in self.own}
        for key, name in named.items():
            if not key or not is_sendable(key):
                form = "Bearer and a key" if name == "authorization" else "a key"
                raise _refused(name, f"The header {name!r} must contain {form} without spaces.")
        if len(named) > 1:
            raise _refused(max(named.values()), "The headers name two different API keys. Send only one.")
        return next(iter(named), None)


def ambient_keys() -> frozenset[str]:
    """Return the keys in OPENAI_CUSTOM_HEADERS. They are meant for OpenAI, so the cloud does not receive them."""
    lines = [line.partition(":") for line in os.environ.get("OPENAI_CUSTOM_HEADERS", "").splitlines()]
    values = [value.strip() for name, _, value in lines if name.strip().lower() in ("authorization", *_OTHER_HEADERS)]
    return frozenset(value.partition(" ")[2].strip() if " " in value else value for value in values)


def _refused(name: str, fault: str) -> InvalidRequestError:
    return InvalidRequestError(fault, param=name, code="unsupported_header")
