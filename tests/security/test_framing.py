"""A request with two framings is refused, and its connection ends: no second request hides in its body."""

from __future__ import annotations

from typing import Any

import pytest
from raw_http import exchanged

HIDDEN = b"GET /admin/usage HTTP/1.1\r\nhost: localhost\r\n\r\n"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize(
    "request_",
    [
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 0\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD + b"content-length: 0\r\ncontent-length: 47\r\n\r\n" + HIDDEN,
        HEAD + b"content-length: 0, 47\r\n\r\n" + HIDDEN,
        HEAD + b"content-length: +0\r\n\r\n" + HIDDEN,
        HEAD + b"content-length: -1\r\n\r\n" + HIDDEN,
        HEAD + b"content-length : 0\r\n\r\n" + HIDDEN,
        HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\n" + HIDDEN,
        HEAD + b"transfer-encoding: chunked\r\n\r\n0x0\r\n\r\n" + HIDDEN,
        HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n" + HIDDEN,
        HEAD + b"x: y\nhost: evil\n\n" + HIDDEN,
        b"POST /v1/chat/completions HTTP/1.0\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        + HIDDEN,
    ],
)
def test_one_answer_and_the_end_of_the_connection(gateway: Any, request_: bytes) -> None:
    answer = exchanged(gateway.url, request_, timeout_s=10)
    assert answer.count(b"HTTP/1.1 ") <= 1, answer
    assert b"HTTP/1.1 2" not in answer
    assert b"HTTP/1.1 5" not in answer
    assert gateway.chat() == 200
