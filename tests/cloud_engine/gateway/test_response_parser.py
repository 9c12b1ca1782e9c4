"""The parser of nodes' responses: like h11 however the bytes are cut, strict about framing, linear in what comes."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.cloud_engine.gateway.upstream.failures import UpstreamFailure
from updraft.cloud_engine.gateway.upstream.response_parser import ResponseParser

HEAD = b"HTTP/1.1 200 OK\r\n"
VALUES = st.from_regex(rb"[!-~]([ -~]{0,20}[!-~])?", fullmatch=True)
NAMES = st.from_regex(rb"x-[a-zA-Z0-9]{1,8}", fullmatch=True)
CUTS = st.lists(st.integers(1, 50), min_size=1, max_size=5)


def parsed(raw: bytes, cuts: list[int]) -> tuple[ResponseParser, bytes]:
    parser, body, position, turn = ResponseParser(), b"", 0, 0
    while position < len(raw):
        size = cuts[turn % len(cuts)]
        body += parser.feed(raw[position : position + size])
        position, turn = position + size, turn + 1
    return parser, body


def by_h11(raw: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "h")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(raw)
    response, body = None, b""
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.Response):
            response = event
        else:
            assert isinstance(event, h11.InformationalResponse), event
    assert response is not None
    return response.status_code, [(bytes(name), bytes(value)) for name, value in response.headers], body


@given(
    st.sampled_from([200, 400, 503]),
    st.lists(st.tuples(NAMES, VALUES), max_size=5),
    st.lists(st.binary(min_size=1, max_size=60), max_size=6),
    st.booleans(),
    CUTS,
)
def test_like_h11_however_it_is_cut(
    status: int, headers: list[tuple[bytes, bytes]], pieces: list[bytes], chunked: bool, cuts: list[int]
) -> None:
    lines = b"".join(b"%b:  %b \r\n" % header for header in headers)
    if chunked:
        body = b"".join(b"%X;x=y\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nt: u\r\n\r\n"
        raw = b"HTTP/1.1 %d Odd\r\n%btransfer-encoding: Chunked\r\n\r\n%b" % (status, lines, body)
    else:
        body = b"".join(pieces)
        raw = b"HTTP/1.1 %d Odd\r\n%bContent-Length: %d\r\n\r\n%b" % (status, lines, len(body), body)
    raw = b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + raw
    parser, got = parsed(raw, cuts)
    assert parser.complete
    assert parser.reusable
    expected = by_h11(raw)
    assert (parser.status, got) == (expected[0], expected[2])
    assert [(n, v) for n, v in parser.headers if n != b"transfer-encoding"] == [
        (n, v) for n, v in expected[1] if n != b"transfer-encoding"
    ]


@given(st.binary(max_size=200), CUTS)
def test_any_bytes_are_an_answer_or_a_failure(raw: bytes, cuts: list[int]) -> None:
    for start in (b"", HEAD, HEAD + b"transfer-encoding: chunked\r\n\r\n"):
        try:
            parser, _ = parsed(start + raw, cuts)
            parser.feed_end()
        except UpstreamFailure:
            continue
        assert parser.complete


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        HEAD + b"content-length: 3\r\ncontent-length: 4\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n",
        HEAD + b"x: a\r\n folded\r\n\r\n",
        HEAD + b"x : a\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n0x5\r\nhello\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nhello\r\n",
        HEAD + b"x: " + b"a" * 70_000,
        HEAD + b"transfer-encoding: chunked\r\n\r\n1;" + b"a" * 5000,
        HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"t: u\r\n" * 100,
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    ],
)
def test_ambiguous_responses_are_refused(raw: bytes) -> None:
    with pytest.raises(UpstreamFailure):
        parsed(raw, [4096])


def test_when_a_connection_may_serve_another_request() -> None:
    assert parsed(HEAD + b"content-length: 0\r\n\r\n", [99])[0].reusable
    assert not parsed(HEAD + b"content-length: 0\r\nconnection: Close\r\n\r\n", [99])[0].reusable
    assert not parsed(b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n", [99])[0].reusable
    assert not parsed(HEAD + b"content-length: 0\r\n\r\nmore", [99])[0].reusable, "nobody asked for more"
    endless, body = parsed(HEAD + b"\r\nall that comes", [7])
    endless.feed_end()
    assert (body, endless.complete, endless.reusable) == (b"all that comes", True, False)


def test_ten_thousand_small_chunks_are_looked_at_once() -> None:
    searched = 0

    class Counting(bytearray):
        def find(self, *where: object) -> int:  # type: ignore[override]
            nonlocal searched
            searched += len(self) - (where[1] if len(where) > 1 else 0)  # type: ignore[operator]
            return super().find(*where)  # type: ignore[arg-type]

    parser = ResponseParser()
    parser._buffer = Counting()
    raw = HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"5\r\nhello\r\n" * 10_000 + b"0\r\n\r\n"
    for position in range(0, len(raw), 3):
        parser.feed(raw[position : position + 3])
    assert parser.complete
    assert searched < 5 * len(raw)
