"""Server-sent events: the same events for any chunking, and comments during pauses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from updraft.protocol.http import sse
from updraft.protocol.http.app import send
from updraft.protocol.http.wire import WireResponse

PAYLOADS = st.lists(
    st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers(-9, 9), max_size=3), max_size=6
)


@given(PAYLOADS, st.lists(st.integers(1, 9), min_size=1), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.booleans())
def test_any_chunking_yields_the_same_events(
    payloads: list[dict[str, object]], cuts: list[int], line_end: bytes, comments: bool
) -> None:
    stream = b"".join((b": ping\n\n" if comments else b"") + sse.event(payload) for payload in payloads) + sse.DONE
    stream = stream.replace(b"\n", line_end)
    if comments:
        stream = b"\xef\xbb\xbf" + stream
    parser = sse.EventParser()
    events: list[bytes] = []
    position, turn = 0, 0
    while position < len(stream):
        size = cuts[turn % len(cuts)]
        events += parser.feed(stream[position : position + size])
        position, turn = position + size, turn + 1
    assert [msgspec.json.decode(event) for event in events] == payloads
    assert parser.done


def test_lines_of_one_event_join_and_other_fields_are_ignored() -> None:
    parser = sse.EventParser()
    assert parser.feed(b"event: x\ndata: one\nid: 3\ndata:two\n\n") == [b"one\ntwo"]
    assert not parser.done


def test_line_ends_may_differ_from_line_to_line() -> None:
    parser = sse.EventParser()
    assert parser.feed(b"data: one\r\r\ndata: two\n\r") == [b"one", b"two"]
    assert parser.feed(b"\n\xef\xbb\xbfdata: a mark is one at the start only\n\n") == []


def test_nothing_after_done_counts() -> None:
    parser = sse.EventParser()
    assert parser.feed(sse.event(1) + sse.DONE + sse.event(2)) == [b"1"]
    assert parser.feed(sse.event(3)) == []


def test_an_event_without_an_end_costs_neither_memory_nor_time() -> None:
    parser, chunk = sse.EventParser(), b"data: a long one"
    began = time.process_time()
    for _ in range(sse.MAX_EVENT_BYTES // len(chunk)):
        assert parser.feed(chunk) == []
    assert time.process_time() - began < 20, "looking through all of it each time takes minutes"
    with pytest.raises(sse.EventTooLongError):
        parser.feed(chunk)


def test_long_events_that_end_are_events() -> None:
    parser = sse.EventParser()
    long = sse.event("x" * (sse.MAX_EVENT_BYTES - 100))
    assert [len(payload) for payload in parser.feed(long * 3 + sse.DONE)] == [sse.MAX_EVENT_BYTES - 98] * 3


def test_a_silent_stream_is_kept_alive() -> None:
    """The second event waits for the comment; without heartbeats none comes."""

    async def sent_with(heartbeat_s: float) -> list[bytes]:
        beaten, sent = asyncio.Event(), list[bytes]()

        async def events() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            if heartbeat_s:
                await beaten.wait()
            yield sse.DONE

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def take(message: Any) -> None:
            sent.append(message.get("body", b""))
            if sent[-1] == sse.KEEP_ALIVE:
                beaten.set()

        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "state": {"request_id": "r"}}
        scope |= {"query_string": b"", "server": ("a", 80), "scheme": "http"}
        response = send(WireResponse(200, sse.HEADERS, events()), Request(scope), heartbeat_s)
        await asyncio.wait_for(response(scope, receive, take), 20)
        return sent

    assert sse.KEEP_ALIVE in asyncio.run(sent_with(0.01))
    assert asyncio.run(sent_with(0.0)) == [b"", b"data: 1\n\n", sse.DONE, b""]
