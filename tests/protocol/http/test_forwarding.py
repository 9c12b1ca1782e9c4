"""The headers and query strings of callers that reach the next hop."""

from __future__ import annotations

import pytest
from updraft.protocol.errors import InvalidRequestError
from updraft.protocol.http.forwarding import forwarded

PASSED = [
    "OpenAI-Organization",
    "OpenAI-Project",
    "OpenAI-Beta",
    "X-Title",
    "HTTP-Referer",
    "traceparent",
    "X-Trace-Id",
]
LEFT = ["Authorization", "Cookie", "Host", "Connection", "Transfer-Encoding", "Proxy-Authorization", "Content-Length",
        "User-Agent", "X-Stainless-Lang", "X-Forwarded-For", "X-Updraft-Tenant", "X-Request-Id", "Sec-Fetch-Mode",
        "Origin", "Api-Key", "X-Api-Key", "X-HTTP-Method-Override", "TE", "Upgrade", "Accept-Encoding",
        "X-Data-Parallel-Rank", "X-Prefiller-Host-Port", "X-SMG-Target-Worker"]  # fmt: skip
DROPPED = [
    "X-Session-Id",
    "Session-Id",
    "Thread-Id",
    "Originator",
    "B3",
    "Editor-Version",
    "X-Auth-Token",
    "X-Goog-Api-Key",
    "X-Session",
    "Helicone-Auth",
    "X-CSRF-Token",
    "Strange",
    "OpenAI-Secret",
]


@pytest.mark.parametrize("name", PASSED)
def test_passed_on(name: str) -> None:
    assert forwarded({name: "v"}).headers == {name.lower(): "v"}


@pytest.mark.parametrize("name", LEFT)
def test_of_this_hop_alone(name: str) -> None:
    assert forwarded({name: "v"}).headers == {}


@pytest.mark.parametrize("name", DROPPED)
def test_dropped_with_a_note_that_hides_the_value(name: str) -> None:
    selected = forwarded({name: "hunter2", "X-Title": "kept"})
    assert selected.headers == {"x-title": "kept"}
    assert selected.notes == (f"header {name.lower()}: not forwarded",)


def test_a_query_goes_along_unless_it_holds_a_key() -> None:
    assert forwarded({}, "api-version=1&a=b").target("chat") == "chat?api-version=1&a=b"
    assert forwarded({}).target("chat") == "chat"
    with pytest.raises(InvalidRequestError, match="'api_key'"):
        forwarded({}, "api_key=hunter2")


def test_another_key_than_that_in_authorization_is_noted() -> None:
    for key, notes in (("a", ()), ("b", ("header x-api-key: not forwarded",))):
        assert forwarded({"Authorization": "Bearer a", "X-Api-Key": key}).notes == notes


def test_headers_that_the_connection_header_names_are_not_forwarded() -> None:
    headers = {"Connection": "keep-alive, X-Hop", "x-hop": "1", "x-other": "2"}
    assert forwarded(headers).headers == {"x-other": "2"}
