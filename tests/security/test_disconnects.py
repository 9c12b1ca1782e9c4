"""A client that leaves, at whatever stage of its request, keeps nothing reserved."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

import pytest
from gateway_keys import make_key
from raw_http import post
from updraft.cloud_engine.gateway.access.principal import Limits
from waiting import wait_for

RESET = struct.pack("ii", 1, 0)
LONG = {"model": "echo", "messages": [{"role": "user", "content": "x" * 1500}]}


@pytest.fixture(scope="module")
def key(gateway: Any) -> str:
    return make_key(gateway.keys_file, "one-at-a-time", limits=Limits(max_concurrency=1, tokens_per_minute=10**6))


@pytest.mark.parametrize("stage", ["head", "body", "sent", "answer"])
@pytest.mark.parametrize("stream", [True, False])
def test_its_place_is_free_again(gateway: Any, key: str, stage: str, stream: bool) -> None:
    address = urlsplit(gateway.url)
    body = json.dumps({**LONG, "stream": stream}).encode()
    sent = post("/v1/chat/completions", body, f"authorization: Bearer {key}")
    part = {"head": sent[:60], "body": sent[:-50]}.get(stage, sent)
    for _ in range(3):
        with socket.create_connection((address.hostname, address.port), timeout=60) as client:
            client.sendall(part)
            if stage == "answer":
                assert client.recv(100)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    wait_for(lambda: gateway.chat(key) == 200)
