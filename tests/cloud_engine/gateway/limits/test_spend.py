"""Budgets of the gateway in US dollars hold whatever nodes write: whole answers and streams, by day and by month."""

from __future__ import annotations

import fcntl
import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_keys import make_key
from long_cloud import LongCloud, long_cloud
from updraft.cloud_engine.gateway.access.principal import Limits

INPUT, OUTPUT, LIMIT = 1.0, 5.0, 0.10


@dataclass
class Spending:
    url: str
    keys: Path
    cloud: LongCloud

    def ask(self, key: str, path: str = "chat/completions", **fields: Any) -> httpx.Response:
        body = {"model": "big", "messages": [{"role": "user", "content": "hi"}], **fields}
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}/v1/{path}", json=body, headers=headers, timeout=60)

    def ask_many(self, count: int, key: str, **fields: Any) -> list[httpx.Response]:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda _: self.ask(key, **fields), range(count)))


@pytest.fixture(scope="module")
def gateway(spawned: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spending]:
    folder = tmp_path_factory.mktemp("spend")
    (folder / "prices.toml").write_text(f'[prices.models."big"]\ninput = {INPUT}\noutput = {OUTPUT}\n')
    make_key(folder / "keys", "first")
    with long_cloud() as cloud:
        options = ("--keys", folder / "keys", "--ledger", folder / "usage.sqlite", "--prices", folder / "prices.toml")
        node = ("--node", cloud.url.removesuffix("/v1"), "--workers", "2")
        command = ("-m", "updraft", "gateway", "--port", "0", *node, *map(str, options), "--exit-with-parent")
        with spawned(*command) as process:
            yield Spending(process.url, folder / "keys", cloud)


@pytest.fixture
def key(gateway: Spending, request: pytest.FixtureRequest) -> str:
    cloud, limits = gateway.cloud, getattr(request, "param", Limits(usd_per_day=LIMIT))
    cloud.tokens, cloud.chunk, cloud.word, cloud.hidden, cloud.honours = 16_000, 64, "word ", 0, True
    cloud.requests.clear()
    cloud.costs.clear()
    return make_key(gateway.keys, uuid.uuid4().hex, limits=limits)


@pytest.mark.parametrize(
    "key", [Limits(usd_per_day=LIMIT), Limits(usd_per_month=LIMIT, usd_per_day=5.0)], indirect=True
)
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"max_output_tokens": 5}, {"max_tokens": 50_000}])
def test_long_answers_at_once_stay_within_the_limit(gateway: Spending, key: str, fields: dict[str, int]) -> None:
    answers = gateway.ask_many(40, key, **fields)
    assert 0.05 < gateway.cloud.usd(INPUT, OUTPUT) <= LIMIT
    answered = [each for each in answers if each.status_code == 200]
    assert len(answered) >= 3
    assert all("the budget leaves" in each.headers["x-updraft-notes"] for each in answered)
    assert {each.status_code for each in answers} == {200, 429}


def test_requests_that_raise_the_price_need_a_key_without_a_budget(gateway: Spending, key: str) -> None:
    dear: dict[str, Any] = {"service_tier": "priority", "max_tokens": 5}
    for fields in (dear, {"provider": {"order": ["dear-host"]}}):
        refused = gateway.ask(key, **fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(fields)))
    assert not gateway.cloud.requests
    assert gateway.ask(key, service_tier="flex", max_tokens=5).status_code == 200
    free = make_key(gateway.keys, uuid.uuid4().hex)
    assert gateway.ask(free, **dear).status_code == 200


def test_a_cap_leaves_all_other_fields_as_they_are(gateway: Spending, key: str) -> None:
    body = b'{"model":"big","messages":[{"role":"user","content":"hi"}],"metadata":{"x":1e999}}'
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", content=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert "the budget leaves" in answer.headers["x-updraft-notes"]


@pytest.mark.parametrize(
    "written", [{}, {"hidden": 8_000}, {"word": "ab", "chunk": 20}, {"word": "ab", "chunk": 4_000}]
)
@pytest.mark.parametrize("fields", [{}, {"max_tokens": 9_000}])
def test_streams_at_once_stay_within_the_limit_whatever_they_hide(
    gateway: Spending, key: str, written: dict[str, Any], fields: dict[str, int]
) -> None:
    """No event shows how many tokens have been written: not those of reasoning, and not those of dense text."""
    for name, value in written.items():
        setattr(gateway.cloud, name, value)
    answered = [each for each in gateway.ask_many(20, key, stream=True, **fields) if each.status_code == 200]
    assert len(answered) >= 3 and all(each.text.endswith("data: [DONE]\n\n") for each in answered)
    assert all('"finish_reason": "length"' in each.text for each in answered)
    assert gateway.cloud.ended(len(answered))
    assert 0.05 < gateway.cloud.usd(INPUT, OUTPUT) <= LIMIT


def test_a_stream_is_cut_whose_node_ignores_the_cap(gateway: Spending, key: str) -> None:
    gateway.cloud.tokens, gateway.cloud.chunk, gateway.cloud.honours = 90_000, 1_000, False
    answer = gateway.ask(key, stream=True, max_tokens=15_000)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert answer.text.endswith("data: [DONE]\n\n")
    assert [choice["finish_reason"] for choice in events[-1]["choices"]] == ["length"]
    assert "the answer is truncated" in events[-1]["updraft"]["notes"][0]
    assert gateway.cloud.ended(1) and gateway.cloud.written < 80_000


@pytest.mark.parametrize("key", [Limits(usd_per_day=2.0)], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_budget_covers_is_sent_and_answered_as_it_is(
    gateway: Spending, key: str, stream: bool
) -> None:
    answer = gateway.ask(key, stream=stream)
    assert answer.status_code == 200
    assert "x-updraft-notes" not in answer.headers
    assert not stream or answer.text.count("word") == 16_000
    assert "max_tokens" not in gateway.cloud.requests[0]


def test_short_answers_release_their_reservation(gateway: Spending, key: str) -> None:
    gateway.cloud.tokens = 100
    assert [gateway.ask(key, max_tokens=15_000).status_code for _ in range(20)] == [200] * 20


@pytest.mark.parametrize("key", [Limits(usd_per_day=2.0)], indirect=True)
def test_a_stream_whose_budget_cannot_be_read_any_more_ends_with_an_error(gateway: Spending, key: str) -> None:
    gateway.cloud.honours = False  # more is reserved for a stream that passes its limit only
    body = {"model": "big", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 1_000}
    headers = {"authorization": f"Bearer {key}"}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=60) as answer:
        lines = answer.iter_lines()
        assert "word" in next(lines)
        with gateway.keys.with_name("usage.sqlite.limits").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            rest = list(lines)
    assert "try again later" in [line for line in rest if line][-1]
