"""The gateway as a process: limits, prices and the ledger on the wire, also across `kill -9`, and `updraft usage`."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gateway_keys
import httpx
import openai
import pytest
from updraft.cloud_engine.gateway.access.principal import Limits
from updraft.cloud_engine.gateway.ledger.opening import open_reader
from waiting import wait_for

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PRICES = """
[[prices]]
model = "echo"
input = 1000
output = 2000

[[prices]]
model = "echo"
from = 2999-01-01
input = 1
output = 1
"""


@pytest.fixture
def start(spawn: Any, tmp_path: Path) -> Callable[..., Any]:
    """A gateway in front of a node, with prices, and `--limits` where there is such a file."""

    def start(node: Any, *more: str) -> Any:
        (tmp_path / "prices.toml").write_text(PRICES)
        files = ("--ledger", str(tmp_path / "usage"), "--keys", str(tmp_path / "keys"))
        return spawn("-m", "updraft", "gateway", "--port", "0", "--node", node.url, *files, *more)

    return start


@pytest.fixture
def make_key(tmp_path: Path) -> Callable[..., str]:
    def make(name: str, **limits: Any) -> str:
        return gateway_keys.make_key(tmp_path / "keys", name, limits=Limits(**limits))

    return make


def client(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    with open_reader(tmp_path / "usage").rows() as reading:
        return list(reading)


def settled(tmp_path: Path, count: int) -> list[dict[str, Any]]:
    """Return the rows as soon as `count` of them are settled."""
    wait_for(lambda: sum(each["state"] == "settled" for each in rows(tmp_path)) >= count)
    return rows(tmp_path)


def test_limits_and_prices_on_the_wire(
    start: Callable[..., Any], make_key: Callable[..., str], fake_node: Any, tmp_path: Path
) -> None:
    """As OpenAI has them; what is reserved and not used is given back; refusals leave a row, too."""
    key = make_key("tester", requests_per_minute=3, tokens_per_minute=100_000, usd_per_day=1000.0)
    gateway = start(fake_node, "--prices", str(tmp_path / "prices.toml"))
    with client(gateway.url, key) as asking:
        for left in (2, 1, 0):
            answer = asking.chat.completions.with_raw_response.create(model="echo", messages=HELLO, max_tokens=50)
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert int(answer.headers["x-ratelimit-remaining-requests"]) in (left, left + 1)
        with pytest.raises(openai.RateLimitError) as refused:
            for _ in range(3):  # one request more fits every 20 seconds
                asking.chat.completions.create(model="echo", messages=HELLO, max_tokens=50)
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 20
        assert refused.value.code == "rate_limit_exceeded"
        with pytest.raises(openai.BadRequestError) as wrong:
            asking.chat.completions.create(model="echo", messages=HELLO, n=1000)
        assert wrong.value.param == "n"
    usage_rows = settled(tmp_path, 5)
    assert {each["status"] for each in usage_rows} == {200, 400, 429}
    for each in usage_rows:
        assert (each["key_name"], each["tenant"], each["tier"]) == ("tester", "tester", "interactive")
        assert each["key_id"]
        if each["status"] == 200:
            cost = (each["prompt_tokens"] * 1000 + each["completion_tokens"] * 2000) / 1e6
            assert each["cost_usd"] == pytest.approx(cost)
            assert cost > 0
        else:
            assert not each["cost_usd"]


def test_kill_9_in_mid_stream_leaves_a_row_that_costs_what_was_reserved(
    start: Callable[..., Any], make_key: Callable[..., str], spawn_held_node: Any, hold: Path, tmp_path: Path
) -> None:
    """The cut request is abandoned, not lost; its place among the concurrent ones is free again, its budget spent."""
    key = make_key("tester", max_concurrency=1, tokens_per_minute=500, usd_per_day=2.0)
    node, priced = spawn_held_node(), ("--prices", str(tmp_path / "prices.toml"))
    gateway, began = start(node, *priced), threading.Event()
    long: list[Any] = [{"role": "user", "content": "x" * 400}]

    def stream() -> None:
        with suppress(openai.APIError, httpx.HTTPError), client(gateway.url, key) as asking:
            for _ in asking.chat.completions.create(model="echo", messages=long, stream=True, max_tokens=450):
                began.set()

    reading = threading.Thread(target=stream)
    reading.start()
    assert began.wait(60)
    assert rows(tmp_path) == []
    with client(gateway.url, key) as asking, pytest.raises(openai.RateLimitError):
        asking.chat.completions.create(model="echo", messages=HELLO, max_tokens=1)
    settled(tmp_path, 1)
    gateway.popen.kill()
    hold.unlink()
    reading.join()
    again = start(node, *priced)
    with client(again.url, key) as asking:
        with pytest.raises(openai.RateLimitError, match="budget renews"):
            asking.chat.completions.create(model="echo", messages=long, max_tokens=450)
        asking.chat.completions.create(model="echo", messages=HELLO, max_tokens=5)
    usage_rows = settled(tmp_path, 3)
    assert sorted(each["state"] for each in usage_rows) == ["abandoned", "settled", "settled", "settled"]
    (reserved,) = [each["cost_usd"] for each in usage_rows if each["state"] == "abandoned"]
    assert 0.4 + 450 * 0.002 < reserved < 2.0


def test_usage_of_the_gateway_for_people_and_programs(
    start: Callable[..., Any], make_key: Callable[..., str], fake_node: Any, tmp_path: Path
) -> None:
    keys = [make_key(name) for name in ("team-a", "team-b")]
    gateway = start(fake_node, "--prices", str(tmp_path / "prices.toml"))
    for key in keys:
        with client(gateway.url, key) as asking:
            asking.chat.completions.create(model="echo", messages=HELLO)
    settled(tmp_path, 2)

    def usage(*more: str) -> str:
        command = [sys.executable, "-m", "updraft", "usage", "--gateway", str(tmp_path / "usage"), *more]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    by_key = json.loads(usage("--by", "key", "--json"))["key"]
    assert [(each["key_name"], each["requests"]) for each in by_key] == [("team-a", 1), ("team-b", 1)]
    (day,) = csv.DictReader(io.StringIO(usage("--by", "day", "--csv")))
    assert day["day"] in (time.strftime("%Y-%m-%d", time.gmtime(each["started_at"])) for each in rows(tmp_path))
    assert float(day["cost_usd"]) == pytest.approx(sum(each["cost_usd"] for each in by_key))
    lines = [json.loads(line) for line in usage("--rows", "--json").splitlines()]
    assert lines == rows(tmp_path)
    assert "team-b" in usage("--by", "key")
