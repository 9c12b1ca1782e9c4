"""Two gateways over one real Redis server, and four workers of one, hold a limit together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_keys import make_key
from redis_server import expire_leases
from updraft.cloud_engine.gateway.access.principal import Limits

CONCURRENT = 4
MINUTE = 2000  # tokens
ROOMY = 100  # with which no request takes more than was reserved for it


@pytest.fixture
def urls(spawn: Any, spawn_fake_node: Any, redis_url: str, tmp_path: Path) -> list[Any]:
    """Each with a ledger of its own, as on two machines."""
    node = spawn_fake_node("--delay", "0.02")
    common = ("--port", "0", "--node", node.url, "--keys", str(tmp_path / "keys"), "--limits-url", redis_url)
    make_key(tmp_path / "keys", "first")
    return [spawn("-m", "updraft", "gateway", *common, "--ledger", str(tmp_path / f"usage-{n}")) for n in range(2)]


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": text}], **more}


def ask(url: str, key: str, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/chat/completions", json=body("x" * 50, **more), headers=headers, timeout=60)


def test_requests_at_once_are_counted_over_both(urls: list[Any], redis_url: str, tmp_path: Path) -> None:
    key = make_key(tmp_path / "keys", "tester", limits=Limits(max_concurrency=CONCURRENT))
    held: list[Iterator[str]] = []
    with ExitStack() as streams:
        for number in range(CONCURRENT):
            client = streams.enter_context(httpx.Client(timeout=60, headers={"authorization": f"Bearer {key}"}))
            path = f"{urls[number % 2].url}/v1/chat/completions"
            asked = client.stream("POST", path, json=body("x" * 1500, stream=True))
            response = streams.enter_context(asked)
            assert response.status_code == 200
            held.append(response.iter_lines())  # once forgotten, it closes the connection
            next(held[-1])
        for gateway in urls:
            refused = ask(gateway.url, key)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        urls[0].popen.kill()
        urls[0].popen.wait()
        assert ask(urls[1].url, key).status_code == 429  # a lease lasts a while
        expire_leases(redis_url)
        assert ask(urls[1].url, key).status_code == 200


@pytest.mark.parametrize("redis", [True, False], ids=["two gateways", "four workers"])
def test_tokens_of_a_minute_are_counted_over_all(
    request: pytest.FixtureRequest, spawn: Any, fake_node: Any, tmp_path: Path, redis: bool
) -> None:
    """More are asked for than fit; the account never holds more than its limit."""
    key = make_key(tmp_path / "keys", "tester", limits=Limits(tokens_per_minute=MINUTE))
    if redis:
        urls = request.getfixturevalue("urls")
    else:
        files = ("--keys", str(tmp_path / "keys"), "--ledger", str(tmp_path / "usage"))
        command = ("gateway", "--port", "0", "--workers", "4", "--node", fake_node.url)
        urls = [spawn("-m", "updraft", *command, *files)] * 2
    began = time.monotonic()
    answers: list[httpx.Response] = []
    used = 0
    with ThreadPoolExecutor(20) as pool:
        while used <= MINUTE / 2:  # what an answer did not use is given back after a while
            answers += pool.map(lambda number: ask(urls[number % 2].url, key, max_tokens=ROOMY), range(240))
            used = sum(answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200)
    assert {answer.status_code for answer in answers} == {200, 429}, Counter(a.status_code for a in answers)
    seconds = time.monotonic() - began
    assert used <= MINUTE * (1 + seconds / 60)
