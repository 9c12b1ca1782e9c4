"""No address in a request is ever asked: not an image's, not an absolute target's, not one that parsers read apart."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from raw_http import exchanged, status_of

BODY = json.dumps({"model": "echo", "messages": [{"role": "user", "content": "hi"}]}).encode()


@contextmanager
def unasked() -> Iterator[int]:
    """The port of a server to which nobody may have connected by the end of the block."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_parts_with_an_address_are_not_fetched(gateway: Any, kind: str) -> None:
    with unasked() as port:
        for url in (
            f"http://127.0.0.1:{port}/x.png",
            f"http://good.example@127.0.0.1:{port}/",
            f"http://127.0.0.1:{port}\\@good.example/",
            f"http://[::ffff:127.0.0.1]:{port}/",
            f"http://2130706433:{port}/",
            f"http://good.example#@127.0.0.1:{port}/",
        ):
            parts = [{"type": kind, kind: {"url": url, "file_data": url, "data": url, "format": "wav"}}]
            body = {"model": "echo", "messages": [{"role": "user", "content": parts}]}
            answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=gateway.headers, timeout=60)
            assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:{port}/v1/chat/completions",
        "http://127.0.0.1:{port}@localhost/v1/chat/completions",
        "//127.0.0.1:{port}/v1/chat/completions",
        "/v1/chat/completions@127.0.0.1:{port}",
        "/v1/../http://127.0.0.1:{port}/",
        "@127.0.0.1:{port}/v1/chat/completions",
        "/v1/chat/completions?url=http://127.0.0.1:{port}/",
        "/v1/chat/completions#@127.0.0.1:{port}/",
    ],
)
def test_a_target_names_no_server(gateway: Any, target: str) -> None:
    with unasked() as port:
        head = f"POST {target.format(port=port)} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"authorization: Bearer {gateway.key}\r\ncontent-length: {len(BODY)}\r\n\r\n"
        status = status_of(exchanged(gateway.url, head.encode() + BODY))
    assert status == 200 if "?" in target else 400 <= status < 500


@pytest.mark.parametrize("name", ["x-forwarded-host", "x-original-url", "x-rewrite-url", "forwarded", "x-updraft-node"])
def test_a_header_names_no_server(gateway: Any, name: str) -> None:
    with unasked() as port:
        assert status_of(gateway.sent(BODY, f"{name}: http://127.0.0.1:{port}/")) in (200, 400)
