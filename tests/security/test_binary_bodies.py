"""Bytes that are no UTF-8, in names, values or paths, get a typed error: no 500 and no traceback in the log."""

from __future__ import annotations

from typing import Any

import pytest
from raw_http import exchanged, status_of

MESSAGES = b'"messages": [{"role": "user", "content": "hi"}]'


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "echo", ' + MESSAGES + b', "\xff": 1}',
        b'{"\xff": 1, "model": "echo", ' + MESSAGES + b"}",
        b'{"model": "\xff", ' + MESSAGES + b"}",
        b'{"model": "echo", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "echo", ' + MESSAGES + b', "\xed\xa0\x80": 1}',
        b'{"model": "echo", ' + MESSAGES + b', "user": "\\ud800"}',
        b'{"model": "echo", ' + MESSAGES + b', "stream": true, "\xff": 1}',
        b"\xff\xfe{\x00}\x00",
        b"\x00",
        b"",
    ],
)
def test_a_body_of_no_text_is_refused(gateway: Any, body: bytes) -> None:
    answer = gateway.sent(body)
    assert status_of(answer) == 400, answer
    assert b'"type":"invalid_request_error"' in answer
    assert "Traceback" not in gateway.log_file.read_text()


@pytest.mark.parametrize(
    "path", [b"/v1/models/\xff", b"/v1/models/%ff", b"/v1/models/%00", b"/\xff", b"/admin/keys/%ff"]
)
def test_a_path_of_no_text_is_refused(gateway: Any, path: bytes) -> None:
    key = gateway.admin_key if path.startswith(b"/admin") else gateway.key
    head = b"%b %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer %b\r\n\r\n"
    answer = exchanged(gateway.url, head % (b"DELETE" if b"admin" in path else b"GET", path, key.encode()))
    assert 400 <= status_of(answer) < 500, answer
    assert "Traceback" not in gateway.log_file.read_text()
