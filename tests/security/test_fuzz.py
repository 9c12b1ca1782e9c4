"""Fuzzed heads, framings and bodies bring out no 500, no traceback, no address, and no key in a log."""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from http_fuzz import Endpoint, Form, Fuzzer, answer_to

CANARY = "canary-wrong-key"
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"model": "echo", "messages": MESSAGES, "max_tokens": 2}
UPLOAD = Form({"model": "echo", "file": "RIFF"})
TEXT = {"model": "echo", "prompt": "user\nhi", "max_tokens": 2}
ENDPOINTS = {
    "gateway": [
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/chat/completions", {**CHAT, "stream": True}),
        ("POST", "/v1/completions", TEXT),
        ("POST", "/v1/embeddings", {"model": "echo", "input": "hi"}),
        ("POST", "/v1/rerank", {"model": "echo", "query": "hi", "documents": ["a", "b"]}),
        ("POST", "/v1/moderations", {"model": "echo", "input": "hi"}),
        ("POST", "/v1/responses", {"model": "echo", "input": "hi", "stream": True}),
        ("POST", "/v1/messages", CHAT),
        ("POST", "/v1/messages/count_tokens", CHAT),
        ("POST", "/v1/audio/speech", {"model": "echo", "input": "hi", "voice": "x"}),
        ("POST", "/v1/audio/transcriptions", UPLOAD),
        ("POST", "/v1/audio/translations", UPLOAD),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/echo", None),
        ("GET", "/health", None),
    ],
    "admin": [
        ("GET", "/metrics", None),
        ("GET", "/admin/nodes", None),
        ("POST", "/admin/nodes", {"url": "http://127.0.0.1:1", "concurrency": 1}),
        ("DELETE", "/admin/nodes", {"url": "http://127.0.0.1:1"}),
        ("GET", "/admin/usage", None),
        ("GET", "/admin/keys", None),
        ("POST", "/admin/keys", {"name": "fuzz", "scopes": ["usage"], "limits": {"max_concurrency": 1}}),
        ("DELETE", "/admin/keys/nobody", None),
        ("POST", "/admin/keys/nobody/rotate", {"overlap_s": 1}),
        ("GET", "/admin/audit", None),
    ],
    "node": [
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/completions", TEXT),
        ("POST", "/v1/embeddings", {"model": "echo", "input": "hi"}),
        ("POST", "/tokenize", {"model": "echo", "prompt": "hi"}),
        ("POST", "/detokenize", {"model": "echo", "tokens": [1, 2]}),
        ("GET", "/spent/try-x", None),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/echo", None),
        ("GET", "/health", None),
        ("GET", "/metrics", None),
    ],
}
CASES = [
    pytest.param(server, *endpoint, id=f"{server}-{number}-{endpoint[1]}")
    for server, endpoints in ENDPOINTS.items()
    for number, endpoint in enumerate(endpoints)
]
CLIENTS = 8
SUMMING_S = 5.0  # the rows of all other endpoints
GOOD = (b"200", b"201", b"404")  # the node lacks some of the routes that are relayed to it
BROKEN = re.compile(rb"HTTP/1\.1 5(?!03)|\"type\":\"(?:server|engine)_error\"")
LEAK = re.compile(rb"Traceback|File \\?\"|0x[0-9a-f]{8,}|/site-packages/|/protocol/|sqlite3\.")


@pytest.mark.parametrize(("server", "method", "path", "body"), CASES)
def test_nothing_comes_out(gateway: Any, server: str, method: str, path: str, body: dict[str, Any] | None) -> None:
    fuzz(gateway, server, Endpoint(method, path, body), cases=60)


@pytest.mark.soak
@pytest.mark.parametrize(("server", "method", "path", "body"), CASES)
def test_nothing_comes_out_of_ten_thousand(
    gateway: Any, server: str, method: str, path: str, body: dict[str, Any] | None
) -> None:
    fuzz(gateway, server, Endpoint(method, path, body), cases=10_000)


def fuzz(gateway: Any, server: str, endpoint: Endpoint, cases: int) -> None:
    url = gateway.node_url if server == "node" else gateway.url
    key = {"node": "", "gateway": gateway.key, "admin": gateway.admin_key}[server]
    endpoint = Endpoint(endpoint.method, endpoint.path, endpoint.body, key)
    address = gateway.node_url.removeprefix("http://").encode()
    tells_addresses = server == "node" or endpoint.path in ("/metrics", "/admin/nodes")

    def status_of(seed: int, wait_s: float = 0.5) -> bytes:
        request = Fuzzer(seed, CANARY).request(endpoint)
        answer = answer_to(url, request, SUMMING_S if endpoint.path == "/admin/usage" else wait_s)
        if answer[9:12] == b"201":  # the next one wants the name too
            httpx.delete(f"{gateway.url}/admin/keys/fuzz", headers=gateway.admin)
        assert not BROKEN.search(answer), (seed, request, answer)
        assert not LEAK.search(answer), (seed, request, answer)
        assert tells_addresses or address not in answer, (seed, answer)
        return answer[9:12]

    wanted = cases / (40 if endpoint.path == "/admin/keys" else 10)  # a name, scopes and an expiry must all be right
    with ThreadPoolExecutor(CLIENTS) as clients:
        codes = list(clients.map(status_of, range(cases)))
        if sum(map(GOOD.__contains__, codes)) <= wanted:  # a busy machine answers some of them late
            silent = [seed for seed, status in enumerate(codes) if not status]
            codes += clients.map(partial(status_of, wait_s=SUMMING_S), silent)
    statuses = Counter(codes)
    assert sum(map(GOOD.__contains__, codes)) > wanted or endpoint.path == "/admin/nodes", statuses
    assert sum(count for status, count in statuses.items() if status[:1] == b"4") > cases / 10, statuses
    assert gateway.chat() == 200
    assert httpx.get(f"{gateway.node_url}/health").status_code == 200
    log = gateway.log_file.read_text()
    assert not [word for word in (CANARY, gateway.key, gateway.admin_key, "Traceback") if word in log]
