"""Limits on spend hold whatever clouds write: whole answers, streams, several answers, clouds that say no usage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from budget_probe import spent
from cascade_bench import run, text_of, updraft_of
from hypothesis import given
from hypothesis import strategies as st
from long_cloud import PROMPT_TOKENS, LongCloud, long_cloud
from router_fakes import unused_url
from scripted_provider import anthropic_says, running_provider
from updraft.accounting.budget import TOP_UP, TokenDemand
from updraft.accounting.prices import Price
from updraft.accounting.reported_usage import ReportedUsage
from updraft.accounting.token_estimate import ATTACHED_TOKENS, LIMITS, answer_size, capped, prompt_tokens
from updraft.protocol.errors import BudgetExceededError
from updraft.protocol.http.wire import WireRequest
from updraft.router.accounting.budget import NO_CHARGE, Budget, BudgetLimits, Charge, Demand, Reservation
from updraft.router.accounting.ledger import REQUESTS, Ledger
from updraft.router.accounting.prices import Prices
from updraft.router.accounting.request_record import CloudCall, RequestRecord
from updraft.router.cascade.cloud_call import demand_of
from updraft.router.request.chat_request import Caller

INPUT, OUTPUT = 1.0, 5.0
PRICES = Prices(models={"big": Price(INPUT, OUTPUT)})
DIME = BudgetLimits(usd=0.10)  # 20,000 tokens of an answer


@pytest.fixture
def spending(bench: Any) -> Callable[..., Any]:
    """A router with nothing but a cloud, and a limit."""

    def make(cloud: LongCloud, budget: BudgetLimits = DIME, **settings: Any) -> Any:
        of_cloud = {"cloud_url": cloud.url, "cloud_model": "big", "cloud_timeout_s": 30.0}
        return bench(has_local=False, **{"prices": PRICES, "budget": budget, **of_cloud, **settings})

    return make


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"n_predict": -1}, {"max_tokens": 50_000}, {"best_of": 3}])
def test_a_hundred_long_answers_at_once_stay_within_the_limit(
    spending: Callable[..., Any], fields: dict[str, int]
) -> None:
    async def test(cloud: LongCloud) -> None:
        async with spending(cloud) as b:
            answers = await asyncio.gather(*(b.answer("cloud", **fields) for _ in range(100)))
        assert 0.05 < cloud.usd(INPUT, OUTPUT) <= 0.10
        answered = [each["updraft"] for each in answers if "choices" in each]
        assert len(answered) == len(cloud.requests) >= 3
        assert all("the budget leaves" in each["notes"][-1] for each in answered)
        assert {each["error"]["code"] for each in answers if "error" in each} == {"budget_exceeded"}
        assert spent(b.ledger)[2] == pytest.approx(cloud.usd(INPUT, OUTPUT))

    with long_cloud() as cloud:
        run(test(cloud))


@pytest.mark.parametrize("field", ["models", "fallbacks", "preset"])
def test_models_without_a_price_are_refused(spending: Callable[..., Any], field: str) -> None:
    """OpenRouter would answer with another model, at the price of `model`."""

    async def test(cloud: LongCloud) -> None:
        further = {field: ["expensive"], "max_tokens": 5}
        async with spending(cloud) as b:
            refused = await b.answer("cloud", **further)
        assert refused["error"]["param"] == field
        assert not cloud.requests
        async with spending(cloud, BudgetLimits(cloud_tokens=10**6)) as b:
            assert "choices" in await b.answer("cloud", **further), "tokens are counted at any price"

    with long_cloud() as cloud:
        run(test(cloud))


def test_requests_that_raise_the_price_are_refused(spending: Callable[..., Any]) -> None:
    async def test(cloud: LongCloud) -> None:
        dear = {"service_tier": "priority", "max_tokens": 5}
        async with spending(cloud) as b:
            refused = await b.answer("cloud", **dear)
            assert "choices" in await b.answer("cloud", service_tier="flex", max_tokens=5)
        assert refused["error"]["param"] == "service_tier"
        async with spending(cloud, BudgetLimits(cloud_tokens=10**6)) as b:
            assert "choices" in await b.answer("cloud", **dear), "tokens are counted at any price"
        assert len(cloud.requests) == 2

    with long_cloud() as cloud:
        run(test(cloud))


def test_streams_are_capped_where_their_reservation_ends(spending: Callable[..., Any]) -> None:
    async def test(cloud: LongCloud) -> None:
        async with spending(cloud) as b:
            streams = await asyncio.gather(*(b.stream("cloud") for _ in range(3)))
        for _, events, done in streams:
            assert done
            assert "length" in [choice["finish_reason"] for event in events for choice in event["choices"]]
            assert any("the budget leaves" in note for note in updraft_of(events)["notes"])
        assert max(len(text_of(events).split()) for _, events, _ in streams) > 4000, "a quarter of the budget"
        assert 0.05 < spent(b.ledger)[2] == pytest.approx(cloud.usd(INPUT, OUTPUT))

    with long_cloud(chunk=64, tokens=30_000) as cloud:
        run(test(cloud))


@pytest.mark.parametrize(
    ("written", "fields", "usd"),
    [
        ({"hidden": 8_000}, {}, 0.1),
        ({"hidden": 8_000}, {"max_tokens": 9_000}, 0.1),
        ({"hidden": 50_000, "tokens": 50_000}, {}, 3.0),
        ({"word": "ab", "chunk": 20}, {}, 0.1),
        ({"word": "ab", "chunk": 4_000}, {}, 0.1),
        ({"word": "ab", "chunk": 20}, {"max_tokens": 9_000}, 0.1),
    ],
)
def test_streams_at_once_stay_within_the_limit_whatever_they_hide(
    spending: Callable[..., Any], written: dict[str, Any], fields: dict[str, int], usd: float
) -> None:
    """No event shows how many tokens have been written: not those of reasoning, and not those of dense text."""

    async def test(cloud: LongCloud) -> None:
        async def ask() -> None:
            response = await b.ask("cloud", stream=True, **fields)
            if not isinstance(response.body, bytes):
                assert [chunk async for chunk in response.body]

        async with spending(cloud, BudgetLimits(usd=usd)) as b:
            await asyncio.gather(*(ask() for _ in range(20)))
        assert len(cloud.requests) >= 3
        assert usd / 2 < cloud.usd(INPUT, OUTPUT) <= usd
        assert spent(b.ledger)[2] == pytest.approx(cloud.usd(INPUT, OUTPUT))

    with long_cloud(**written) as cloud:
        run(test(cloud))


def test_a_stream_is_cut_whose_cloud_ignores_the_cap(spending: Callable[..., Any]) -> None:
    async def test(cloud: LongCloud) -> None:
        async with spending(cloud) as b:
            _, events, done = await b.stream("cloud", max_tokens=15_000)
        assert done and events[-1]["choices"][0]["finish_reason"] == "length"
        assert "the budget is used up: the answer is truncated" in updraft_of(events)["notes"]

    with long_cloud(chunk=1_000, tokens=90_000, honours=False) as cloud:
        run(test(cloud))
        assert cloud.ended(1) and cloud.written < 80_000


def test_abandoned_stream_costs_its_written_tokens(spending: Callable[..., Any]) -> None:
    """It has reserved 131,072 tokens, and no usage comes."""

    async def test(cloud: LongCloud) -> None:
        async with spending(cloud, BudgetLimits(usd=5.0)) as b:
            response = await b.ask("cloud", stream=True)
            await anext(response.body)
            await response.body.aclose()
            await asyncio.to_thread(b.router.flush_ledger)
            assert cloud.ended(1)
            assert 1_024 * OUTPUT / 1e6 <= spent(b.ledger)[2] < 0.05

    with long_cloud(chunk=64) as cloud:
        run(test(cloud))


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_overtaken_by_others_waits_for_budget(
    spending: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """All pass the rules before the first has reserved."""

    async def within_budget(*_: Any) -> None:
        return None

    async def test(cloud: LongCloud) -> None:
        async def ask() -> int:
            response = await b.ask("cloud", stream=stream, max_tokens=1_000)
            if not isinstance(response.body, bytes):
                assert [chunk async for chunk in response.body]
            return response.status

        monkeypatch.setattr(Budget, "exceeded", within_budget)
        async with spending(cloud, BudgetLimits(usd=0.012)) as b:
            assert await asyncio.gather(*(ask() for _ in range(12))) == [200] * 12

    with long_cloud(tokens=10) as cloud:
        run(test(cloud))


def test_a_settlement_between_a_refusal_and_the_wait_ends_the_wait(tmp_path: Path) -> None:
    async def test() -> None:
        ledger = Ledger(tmp_path / "ledger.sqlite3")
        budget, seen, until = Budget({"all": DIME}, ledger), 0, time.monotonic() + 60
        await budget.reserve(Caller(), Demand(NO_CHARGE, 5e-6, TokenDemand(1024, 1024)))
        budget.in_flight.settled()
        assert await budget.in_flight.settlement(until, seen), "the budget is asked again"
        assert not await budget.in_flight.settlement(until, budget.in_flight.settlements), "nothing is in flight"
        ledger.close()

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_budget_covers_is_sent_and_answered_as_it_is(
    spending: Callable[..., Any], stream: bool
) -> None:
    """16,000 tokens are 8 cents. A budget in dollars covers the longest answer of any model."""

    async def test(cloud: LongCloud) -> None:
        async with spending(cloud, BudgetLimits(usd=2.0)) as b:
            for _ in range(2):
                if stream:
                    _, events, done = await b.stream("cloud")
                    assert done and len(text_of(events).split()) == 16_000
                    info = updraft_of(events)
                else:
                    info = (await b.answer("cloud"))["updraft"]
                assert "notes" not in info
        assert all("max_tokens" not in body for body in cloud.requests)
        assert spent(b.ledger)[2] == pytest.approx(cloud.usd(INPUT, OUTPUT))

    with long_cloud(chunk=160) as cloud:
        run(test(cloud))


def test_a_known_maximum_is_reserved_and_not_capped_where_it_fits(spending: Callable[..., Any]) -> None:
    """Two of three fit. The third gets what is left."""

    async def test(cloud: LongCloud) -> None:
        cloud.length = lambda body: 100 * cloud.asked(3)  # type: ignore[method-assign]
        async with spending(cloud, prices=Prices(models={"big": Price(INPUT, OUTPUT, max_output=9_000)})) as b:
            answers = await asyncio.gather(*(b.answer("cloud") for _ in range(3)))
        assert sorted("notes" in each["updraft"] for each in answers) == [False, False, True]
        assert sorted(body.get("max_tokens", 0) for body in cloud.requests)[:2] == [0, 0]

    with long_cloud() as cloud:
        run(test(cloud))


def test_a_callers_limit_above_the_known_maximum_is_reserved(spending: Callable[..., Any]) -> None:
    async def test(cloud: LongCloud) -> None:
        async with spending(cloud, prices=Prices(models={"big": Price(INPUT, OUTPUT, max_output=1_000)})) as b:
            answers = await asyncio.gather(*(b.answer("cloud", max_tokens=100_000) for _ in range(10)))
        assert 0.05 < cloud.usd(INPUT, OUTPUT) <= 0.10
        assert any("the budget leaves" in each["updraft"]["notes"][-1] for each in answers if "choices" in each)

    with long_cloud() as cloud:
        run(test(cloud))


def test_short_answers_are_not_refused_for_the_long_ones_that_they_might_have_been(
    spending: Callable[..., Any],
) -> None:
    async def test(cloud: LongCloud) -> None:
        async with spending(cloud) as b:
            answers = await asyncio.gather(*(b.answer("cloud", max_tokens=8_000) for _ in range(40)))
        assert all("choices" in each for each in answers), next(each for each in answers if "error" in each)
        assert spent(b.ledger)[2] == pytest.approx(cloud.usd(INPUT, OUTPUT))

    with long_cloud(tokens=100) as cloud:
        run(test(cloud))


@pytest.mark.parametrize(
    ("refuses", "sent"),
    [
        ({"max_tokens": "Unsupported parameter: 'max_tokens'"}, "max_completion_tokens"),
        ({"max_tokens": "max_tokens is too large: 5000. This model supports at most 4096."}, None),
        ({"max_tokens": "The context is 512 tokens, but the prompt has 23 and the answer needs 5000."}, None),
    ],
)
def test_a_cap_is_put_as_the_cloud_takes_it(
    spending: Callable[..., Any], refuses: dict[str, str], sent: str | None
) -> None:
    async def test(cloud: LongCloud) -> None:
        async with spending(cloud) as b:
            info = (await b.answer("cloud"))["updraft"]
        last = cloud.requests[-1]
        assert [name for name in ("max_tokens", "max_completion_tokens") if name in last] == ([sent] if sent else [])
        assert ("notes" in info) == (sent is not None)
        assert cloud.usd(INPUT, OUTPUT) <= 0.10

    with long_cloud(tokens=4096, refuses=refuses) as cloud:
        run(test(cloud))


def test_a_cap_that_a_cloud_takes_in_no_way_is_an_error(spending: Callable[..., Any]) -> None:
    async def test(cloud: LongCloud) -> None:
        cloud.refuses = {name: f"unknown field {name}" for name in ("max_tokens", "max_completion_tokens")}
        async with spending(cloud) as b:
            assert (await b.ask("cloud")).status == 400
        assert not cloud.costs

    with long_cloud() as cloud:
        run(test(cloud))


def test_an_answer_without_usage_costs_its_bytes_at_most(spending: Callable[..., Any]) -> None:
    async def test(cloud: LongCloud) -> None:
        async with spending(cloud) as b:
            await b.answer("cloud")
            await asyncio.to_thread(b.router.flush_ledger)
            assert 0 < spent(b.ledger)[2] < 0.002, "not the thousands of tokens that were reserved"
            await b.stream("cloud", max_tokens=500)
            await asyncio.to_thread(b.router.flush_ledger)
            assert 0.0025 < spent(b.ledger)[2] < 0.02

    with long_cloud(reports=False) as cloud:
        run(test(cloud))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields", [{"reasoning_effort": "high"}, {"reasoning": {"effort": "low"}}, {"thinking": {"type": "enabled"}}]
)
def test_reasoning_that_no_usage_counts_keeps_its_reservation(
    spending: Callable[..., Any], fields: dict[str, Any], stream: bool
) -> None:
    async def test(cloud: LongCloud) -> None:
        async with spending(cloud) as b:
            await (b.stream if stream else b.answer)("cloud", max_tokens=9_000, **fields)
            await asyncio.to_thread(b.router.flush_ledger)
            assert cloud.usd(INPUT, OUTPUT) <= spent(b.ledger)[2] < 0.046
            cloud.reports = True
            await (b.stream if stream else b.answer)("cloud", max_tokens=2_000, **fields)
            await asyncio.to_thread(b.router.flush_ledger)
            assert spent(b.ledger)[2] < 0.046 + 0.0101, "its usage counts"

    with long_cloud(reports=False, hidden=8_000, tokens=9_000) as cloud:
        run(test(cloud))


def test_reasoning_in_a_broken_stream_keeps_its_reservation(spending: Callable[..., Any]) -> None:
    async def test(cloud: LongCloud) -> None:
        async with spending(cloud) as b:
            await b.stream("cloud", max_tokens=9_000, reasoning_effort="high")
            await asyncio.to_thread(b.router.flush_ledger)
            assert cloud.usd(INPUT, OUTPUT) <= spent(b.ledger)[2] < 0.046

    with long_cloud(reports=False, hidden=8_000, tokens=9_000, cuts=True) as cloud:
        run(test(cloud))


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_only_the_total_counts_is_booked(spending: Callable[..., Any], stream: bool) -> None:
    async def test(cloud: LongCloud) -> None:
        async with spending(cloud) as b:
            answer = await (b.stream if stream else b.answer)("cloud", max_tokens=2_000)
            (row,) = await asyncio.to_thread(b.rows)
        assert (row.cloud_prompt_tokens, row.cloud_tokens) == (PROMPT_TOKENS, 2_000)
        assert spent(b.ledger)[2] == pytest.approx(row.cost_usd) == pytest.approx(cloud.usd(INPUT, OUTPUT))
        assert stream or answer["usage"]["completion_tokens"] == 500, "as the cloud wrote it"

    with long_cloud(hidden=1_500, omits=1_500) as cloud:
        run(test(cloud))


@pytest.mark.parametrize("honours", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_the_row_of_an_answer_without_usage_is_what_its_budget_was_charged(
    spending: Callable[..., Any], stream: bool, honours: bool
) -> None:
    async def test(cloud: LongCloud) -> None:
        async with spending(cloud) as b:
            await (b.stream if stream else b.answer)("cloud", max_tokens=100)
            (row,) = await asyncio.to_thread(b.rows)
        _, tokens, usd = spent(b.ledger)
        assert tokens == row.cloud_prompt_tokens + row.cloud_tokens > 0
        assert usd == pytest.approx(row.cost_usd)
        if stream:
            written = 100 if honours else 19_000
            assert written <= row.cloud_tokens <= (500 if honours else 26_000)

    with long_cloud(reports=False, honours=honours, tokens=30_000) as cloud:
        run(test(cloud))


def test_a_lost_answer_without_a_limit_costs_little_without_a_budget(spending: Callable[..., Any]) -> None:
    """A budget would reserve and charge 131,072 tokens for it."""

    async def test(cloud: LongCloud) -> None:
        async with spending(cloud, BudgetLimits(), cloud_timeout_s=0.5) as b:
            await b.handle(WireRequest("POST", "/v1/chat/completions", {}, json.dumps(body).encode()))
            (row,) = await asyncio.to_thread(b.rows)
        assert (row.cloud_tokens, row.status) == (1_024, 504)

    def slow_length(body: dict[str, Any]) -> int:
        cloud.stopped.wait(3.0)
        return 5

    body = {"model": "big", "messages": [{"role": "user", "content": "hi"}]}
    with long_cloud(reports=False) as cloud:
        cloud.length = slow_length  # type: ignore[method-assign]
        run(test(cloud))


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("kind", ["whole", "stream", "cut stream", "closed stream", "timeout", "cancelled"])
def test_calls_without_usage_cost_the_same_with_and_without_a_budget(
    spending: Callable[..., Any], path: str, kind: str
) -> None:
    content = {"messages": [{"role": "user", "content": "hi"}]} if path.startswith("chat") else {"prompt": "hi"}
    body = {"model": "big", "max_tokens": 2_000, "stream": "stream" in kind, **content}
    request = WireRequest("POST", f"/v1/{path}", {}, json.dumps(body).encode())

    async def call(b: Any, cloud: LongCloud) -> None:
        asked = len(cloud.requests)
        task = asyncio.create_task(b.handle(request))
        if kind == "cancelled":
            assert await asyncio.to_thread(cloud.asked, asked + 1)
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            answer = (await task).body
            if kind == "closed stream":
                await anext(answer)
                await answer.aclose()
            elif not isinstance(answer, bytes):
                assert [chunk async for chunk in answer]

    async def test(cloud: LongCloud) -> None:
        rows = []
        for budget in (BudgetLimits(), BudgetLimits(usd=100.0)):
            async with spending(cloud, budget, cloud_timeout_s=0.5 if kind == "timeout" else 30.0) as b:
                await call(b, cloud)
                rows.append((await asyncio.to_thread(b.rows))[0])
        alone, budgeted = ((row.tier, row.cloud_prompt_tokens, row.cloud_tokens, row.cost_usd) for row in rows)
        assert alone == budgeted
        assert rows[0].tier == ("none" if kind == "timeout" else "cloud")
        assert rows[0].cloud_prompt_tokens >= PROMPT_TOKENS and rows[0].cloud_tokens and rows[0].cost_usd

    def slow_length(body: dict[str, Any]) -> int:
        cloud.stopped.wait(3.0)
        return 5

    with long_cloud(reports=False, tokens=300, cuts=kind == "cut stream") as cloud:
        if kind in ("timeout", "cancelled"):
            cloud.length = slow_length  # type: ignore[method-assign]
        run(test(cloud))


def test_a_later_budget_counts_calls_without_usage(spending: Callable[..., Any]) -> None:
    async def test(cloud: LongCloud) -> None:
        async with spending(cloud, BudgetLimits()) as b:
            await b.answer("cloud", max_tokens=2_000, reasoning_effort="high")
        async with spending(cloud, BudgetLimits(usd=0.011)) as b:
            assert (await b.ask("cloud", max_tokens=2_000)).status == 429
        assert len(cloud.requests) == 1

    with long_cloud(reports=False) as cloud:
        run(test(cloud))


def test_a_cloud_that_ignores_its_cap_is_booked_at_its_true_cost(spending: Callable[..., Any]) -> None:
    async def test(cloud: LongCloud) -> None:
        cloud.length = lambda body: 30_000  # type: ignore[method-assign]
        async with spending(cloud) as b:
            await b.answer("cloud")
            await asyncio.to_thread(b.router.flush_ledger)
            assert spent(b.ledger)[2] == pytest.approx(cloud.usd(INPUT, OUTPUT)) and spent(b.ledger)[2] > 0.1
            assert (await b.ask("cloud")).status == 429

    with long_cloud() as cloud:
        run(test(cloud))


@pytest.mark.parametrize("stream", [False, True])
def test_row_and_budget_include_broken_attempts(spending: Callable[..., Any], stream: bool) -> None:
    """Each broken attempt costs its prompt's bytes and 1,024 completion tokens, in the row as in the budget."""

    async def test(cloud: LongCloud) -> None:
        async with spending(cloud) as b:
            await (b.stream if stream else b.answer)("cloud", max_tokens=2_000)
            (row,) = await asyncio.to_thread(b.rows)
            asks, tokens, usd = spent(b.ledger)
        assert len(cloud.requests) == 3
        assert row.cloud_tokens == 2_000 + 2 * 1_024
        assert row.cloud_prompt_tokens + row.cloud_tokens == tokens
        assert row.cost_usd == pytest.approx(usd)
        assert row.decisions.count("retry: big failed") == 2
        assert asks == 1
        assert 2_000 + 2 * 1_024 < tokens < 2_000 + 2 * (1_024 + 400)
        assert usd == pytest.approx(((tokens - 4_048) * INPUT + 4_048 * OUTPUT) / 1e6)

    with long_cloud(breaks=2) as cloud:
        run(test(cloud))


@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_attempt_is_not_repeated_beyond_the_limit(spending: Callable[..., Any], stream: bool) -> None:
    async def test(cloud: LongCloud) -> None:
        async with spending(cloud, BudgetLimits(usd=0.011)) as b:
            response = await b.ask("cloud", stream=stream, max_tokens=2_000)
            assert response.status == 502
            (row,) = await asyncio.to_thread(b.rows)
            assert spent(b.ledger)[2] == pytest.approx(0.0053, rel=0.1)
        assert len(cloud.requests) == 1
        assert row.cost_usd > 0

    with long_cloud(breaks=1) as cloud:
        run(test(cloud))


def test_an_attempt_that_was_never_sent_costs_nothing(spending: Callable[..., Any]) -> None:
    async def test(cloud: LongCloud) -> None:
        async with spending(cloud, cloud_url=f"{unused_url()}/v1") as b:
            assert (await b.ask("cloud")).status == 502
            (row,) = await asyncio.to_thread(b.rows)
            assert (row.cost_usd, spent(b.ledger)[1:]) == (0, (0, 0))

    with long_cloud() as cloud:
        run(test(cloud))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["deadline", "cancelled"])
@pytest.mark.parametrize("proxied", [False, True])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # asyncio's, of cancelled handshakes
def test_a_request_that_ends_before_it_is_sent_costs_nothing(
    spending: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, proxied: bool, end: str, stream: bool
) -> None:
    async def test(silent: socket.socket) -> None:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        if proxied:
            monkeypatch.setenv("https_proxy", f"http://{host}")
        url = f"https://{'cloud.example' if proxied else host}/v1"
        for budget in (BudgetLimits(usd=5.0), BudgetLimits()):
            async with spending(cloud, budget, cloud_url=url, cloud_connect_timeout_s=20.0) as b:
                task = asyncio.create_task(b.ask("cloud", stream=stream, timeout_s=0.5 if end == "deadline" else None))
                connection = (await asyncio.to_thread(silent.accept))[0]
                with connection:
                    assert await asyncio.to_thread(connection.recv, 1), "a handshake has begun"
                    if end == "cancelled":
                        task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                (row, *_) = await asyncio.to_thread(b.rows)
                assert (row.cost_usd, row.cloud_tokens, row.cloud_prompt_tokens) == (0, 0, 0)
                assert row.status == (504 if end == "deadline" else 499)

    with long_cloud() as cloud, socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(20.0)
        run(test(silent))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_every_endpoint_is_capped(spending: Callable[..., Any], path: str) -> None:
    """The lists of prompts, too. The Messages API always has a limit of the caller's."""
    said = [{"role": "user", "content": "hi"}]
    fields: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": ["a", "b", "c"]},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": said, "max_tokens": 60_000},
        "/api/chat": {"messages": said, "stream": False, "options": {"num_predict": -1}},
    }

    async def test(cloud: LongCloud) -> None:
        raw = json.dumps({"model": "cloud", **fields[path]}).encode()
        async with spending(cloud) as b:
            responses = await asyncio.gather(*(b.handle(WireRequest("POST", path, body=raw)) for _ in range(20)))
        assert {each.status for each in responses} <= {200, 429}
        assert cloud.requests and 0 < cloud.usd(INPUT, OUTPUT) <= 0.10
        assert spent(b.ledger)[2] == pytest.approx(cloud.usd(INPUT, OUTPUT))
        limits = [body.get("max_tokens") or body.get("max_completion_tokens") for body in cloud.requests]
        assert all(limits) and sum(limits) * (3 if "prompt" in fields[path] else 1) <= 20_000

    with long_cloud() as cloud:
        run(test(cloud))


_PROCESS = """
import asyncio, sys
from updraft.router.config import RouterConfig
from updraft.router.accounting.budget import BudgetLimits
from updraft.router.accounting.prices import Prices
from updraft.accounting.prices import Price
from updraft.accounting.reported_usage import ReportedUsage
from updraft import AsyncOpenAI
from dataclasses import replace
from pathlib import Path

async def main(url, ledger):
    limits = {"budget": BudgetLimits(usd=0.1), "prices": Prices(models={"big": Price(1.0, 5.0)})}
    config = RouterConfig(local=None, cloud_url=url, cloud_model="big", ledger=Path(ledger), **limits)
    async with AsyncOpenAI(config=config, max_retries=0) as client:
        said = [{"role": "user", "content": "hi"}]
        await asyncio.gather(*(client.chat.completions.create(model="cloud", messages=said) for _ in range(30)),
                             return_exceptions=True)

asyncio.run(main(*sys.argv[1:]))
"""


def test_two_processes_share_the_limit(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.sqlite3"
    with long_cloud() as cloud:
        command = [sys.executable, "-c", _PROCESS, cloud.url, str(ledger)]
        for process in [subprocess.Popen(command) for _ in range(2)]:
            assert process.wait(60) == 0
    assert 0.05 < cloud.usd(INPUT, OUTPUT) <= 0.10
    assert spent(ledger)[2] == pytest.approx(cloud.usd(INPUT, OUTPUT))


def test_without_a_budget_nothing_is_capped(bench: Any) -> None:
    async def test(cloud: LongCloud) -> None:
        async with bench(has_local=False, cloud_url=cloud.url, cloud_model="big") as b:
            assert "notes" not in (await b.answer("cloud"))["updraft"]
        assert "max_tokens" not in cloud.requests[0]

    with long_cloud() as cloud:
        run(test(cloud))


@pytest.mark.parametrize(
    ("path", "fields", "limit", "answers"),
    [
        ("chat/completions", {}, None, 1),
        ("chat/completions", {"max_tokens": 10, "max_completion_tokens": 20}, 20, 1),
        ("chat/completions", {"max_tokens": 0}, 1, 1),
        ("chat/completions", {"max_tokens": None, "n": None, "options": None}, None, 1),
        ("chat/completions", {"max_tokens": [1], "n": {}, "options": [], "thinking": 3, "prediction": 4}, None, 1),
        ("chat/completions", {"max_output_tokens": 5}, None, 1),
        ("chat/completions", {"max_tokens": 10, "n_predict": 900}, 900, 1),
        ("chat/completions", {"max_tokens": 10, "n_predict": -1}, None, 1),
        ("chat/completions", {"max_tokens": 10, "min_tokens": 0}, 10, 1),
        ("chat/completions", {"max_tokens": 10, "options": {"num_predict": 900, "n": 4}}, 900, 4),
        ("chat/completions", {"max_tokens": 10, "n": 3, "best_of": 5}, 10, 5),
        ("chat/completions", {"max_tokens": 10, "maxTokens": 900}, 900, 1),
        ("chat/completions", {"max_tokens": 10, "maxOutputTokens": 900}, 900, 1),
        ("chat/completions", {"max_tokens": 10, "max_output_tokens": 900}, 900, 1),
        ("chat/completions", {"max_tokens": 10, "max_length": 900}, 900, 1),
        ("chat/completions", {"max_tokens": 10, "sampling_params": {"max_new_tokens": 900, "n": 4}}, 900, 4),
        ("chat/completions", {"generationConfig": {"maxOutputTokens": 9, "candidateCount": 4}}, None, 4),
        ("chat/completions", {"max_tokens": 10, "n_cmpl": 4}, 10, 4),
        ("chat/completions", {"max_tokens": 10, "thinking": {"type": "enabled", "budget_tokens": 2000}}, 2010, 1),
        ("chat/completions", {"max_tokens": 10, "thinking_budget": 2000}, 2010, 1),
        ("chat/completions", {"max_tokens": 10, "extra_body": {"max_thinking_tokens": 2000}}, 2010, 1),
        ("chat/completions", {"max_tokens": 10, "chat_template_kwargs": {"reasoning_budget": 2000}}, 2010, 1),
        ("chat/completions", {"max_tokens": 10, "chat_template_kwargs": {"n": 5, "max_length": 900}}, 10, 1),
        ("chat/completions", {"max_tokens": 10, "max_tokens_to_sample": 900, "num_generations": 3}, 900, 3),
        ("completions", {"max_tokens": 10, "prompt": ["a", "b"], "n": 2}, 10, 4),
        ("completions", {"max_tokens": 10, "prompt": [1, 2]}, 10, 1),
        ("completions", {"max_completion_tokens": 10}, None, 1),
        ("responses", {"max_output_tokens": 10, "max_tokens": 1}, 10, 1),
        ("embeddings", {"n": 3}, 0, 1),
    ],
)
def test_every_field_that_lengthens_an_answer_counts(
    path: str, fields: dict[str, Any], limit: int | None, answers: int
) -> None:
    size = answer_size(fields, path)
    assert (size.limit, size.answers) == (limit, answers)
    if path in LIMITS:
        body = capped(fields, 7, LIMITS[path])
        assert (answer_size(body, path).limit or 0) <= 7 + 6, "thinking is a part of it"


def test_variables_of_templates_are_not_capped() -> None:
    variables = {"max_length": 900, "n": 5, "thinking_budget": 900}
    body = capped({"max_tokens": 900, "chat_template_kwargs": variables}, 7, LIMITS["chat/completions"])
    assert body == {"max_tokens": 7, "chat_template_kwargs": {**variables, "thinking_budget": 6}}


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["limited", "unlimited", "top up", "settle", "lose"]), st.integers(0, 9), st.floats(0, 1)
    ),
    max_size=40,
)


@given(st.sampled_from([BudgetLimits(usd=0.1), BudgetLimits(cloud_tokens=20_000), DIME]), OPERATIONS)
def test_no_sequence_of_reservations_passes_a_limit(
    limits: BudgetLimits, operations: list[tuple[str, int, float]]
) -> None:
    """Answers cost what was reserved for them at most, as clouds do that honour caps."""

    async def test(folder: str) -> None:
        ledger = Ledger(Path(folder) / "ledger.sqlite3")
        budget, held = Budget({"all": limits}, ledger), list[Reservation]()
        true = 0.0
        for kind, which, share in operations:
            with contextlib.suppress(BudgetExceededError):
                if kind in ("limited", "unlimited"):
                    wanted = TokenDemand(1024, 2**17) if kind == "unlimited" else TokenDemand(1024, 8000, is_known=True)
                    held.append(await budget.reserve(Caller(), Demand(Charge(1, 1, 10, 10e-6), 5e-6, wanted)))
                elif held and kind == "top up":
                    step, at = Demand(NO_CHARGE, 5e-6, TOP_UP), which % len(held)
                    held[at] = await budget.reserve(Caller(), step, held[at])
                elif held:
                    reserved = held.pop(which % len(held))
                    tokens = int(share * reserved.charge.cloud_tokens)
                    actual = Charge(1, 1, tokens, share * reserved.charge.usd)
                    true += 0 if kind == "lose" else actual.usd
                    with ledger.transaction() as connection:
                        charge = reserved.charge if kind == "lose" else actual
                        connection.executemany(REQUESTS.booking, budget.bookings(Caller(), reserved, charge))
                    budget.in_flight.settled()
            _, used, usd = spent(ledger.path) if held or true else (0, 0, 0.0)
            assert limits.usd is None or usd <= limits.usd + 1e-9
            assert limits.cloud_tokens is None or used <= limits.cloud_tokens
            assert usd >= true - 1e-9
        ledger.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(test(folder))


def test_a_request_waits_for_one_that_reserved_before_the_limits_changed(spending: Callable[..., Any]) -> None:
    async def test(cloud: LongCloud) -> None:
        async with spending(cloud, BudgetLimits(usd=0.006)) as b:
            stream = await b.ask("cloud", stream=True, max_tokens=1_000)
            await anext(stream.body)
            await b.router.reconfigure(replace(b.router.config, budget=BudgetLimits(usd=0.0061)))
            second = asyncio.create_task(b.ask("cloud", max_tokens=1_000))
            await asyncio.sleep(0.2)
            assert not second.done(), "it waits"
            assert [chunk async for chunk in stream.body]
            assert (await second).status == 200

    with long_cloud(tokens=100) as cloud:
        run(test(cloud))


@pytest.mark.parametrize("between", [BudgetLimits(usd=1.0, period="month"), BudgetLimits()])
def test_request_is_charged_once_despite_changed_limits(spending: Callable[..., Any], between: BudgetLimits) -> None:
    """Its reservation is in the row of the day alone."""

    async def test(cloud: LongCloud) -> None:
        async with spending(cloud, BudgetLimits(usd=1.0)) as b:
            stream = await b.ask("cloud", stream=True, max_tokens=1_000)
            await anext(stream.body)
            await b.router.reconfigure(replace(b.router.config, budget=between))
            assert (await b.ask("cloud", max_tokens=1_000)).status == 200
            assert [chunk async for chunk in stream.body]
            b.router.flush_ledger()
            await b.router.reconfigure(replace(b.router.config, budget=BudgetLimits(usd=1.0)))
            assert (await b.ask("cloud", max_tokens=1_000)).status == 200
            b.router.flush_ledger()
            with contextlib.closing(sqlite3.connect(b.ledger)) as connection:
                usd = dict(connection.execute("SELECT period, usd FROM spending").fetchall())
        one = cloud.usd(INPUT, OUTPUT) / 3
        assert usd == pytest.approx({"day": 2 * one, "month": 2 * one} if between else {"day": 2 * one})

    with long_cloud(tokens=100) as cloud:
        run(test(cloud))


@pytest.mark.parametrize("place", ["top", "part", "tool"])
def test_a_request_that_asks_for_cache_writes_reserves_their_price(place: str) -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "word " * 1000}
    plain: dict[str, Any] = {"messages": [{"role": "user", "content": [part]}], "tools": [{"type": "function"}]}
    asked: dict[str, Any] = {
        "top": {**plain, **hint},
        "part": {**plain, "messages": [{"role": "user", "content": [{**part, **hint}]}]},
        "tool": {**plain, "tools": [{"type": "function", **hint}]},
    }
    demands = [
        demand_of(RequestRecord(PRICES, "big"), body, "big", "chat/completions") for body in (plain, asked[place])
    ]
    rates = [each.fixed.usd / each.fixed.cloud_tokens * 1e6 for each in demands]
    assert rates == [pytest.approx(INPUT), pytest.approx(2 * INPUT)]


_TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
_TEXT = "word " * 10_000  # at most 50,000 tokens, which cost $0.05; $0.10 if the cloud stores them
_STORED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def _user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*blocks, {"type": "text", "text": "hi"}]}]}


@pytest.mark.parametrize(
    ("usd", "fields"),
    [
        (0.04, {"tools": [{**_TOOL, "input_examples": [{"to": _TEXT}]}]}),
        (0.04, {"tools": [{**_TOOL, "allowed_callers": [_TEXT]}]}),
        (0.04, _user({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": _TEXT}})),
        (0.09, {**_user({"type": "text", "text": _TEXT}), **_STORED}),
        (0.09, _user({"type": "text", "text": _TEXT, **_STORED})),
        (0.09, {"tools": [{**_TOOL, "description": _TEXT, **_STORED}]}),
        (0.09, {"system": [{"type": "text", "text": _TEXT, **_STORED}]}),
    ],
)
def test_a_request_in_the_clouds_own_api_is_measured_as_it_is_sent(bench: Any, usd: float, fields: Any) -> None:
    body = json.dumps({"model": "cloud", "max_tokens": 5, **_user(), **fields}).encode()

    async def test() -> None:
        with running_provider() as cloud:
            for limit in (usd, 0.12):
                anthropic_says(cloud, [{"type": "text", "text": "Hi"}], "end_turn", stream=False)
                settings = {"cloud_url": cloud.url, "cloud_provider": "anthropic", "cloud_model": "big"}
                budget = BudgetLimits(usd=limit)
                async with bench(has_local=False, prices=PRICES, budget=budget, **settings) as b:
                    status = (await b.handle(WireRequest("POST", "/v1/messages", {}, body))).status
                assert status == (429 if limit == usd else 200)
            assert len(cloud.asked) == 1

    run(test())


def test_images_in_results_of_tools_cost_as_much_as_other_images() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD" * 9_000}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    sizes = [prompt_tokens(json.dumps(_user(block)).encode()) for block in (image, result)]
    assert ATTACHED_TOKENS < sizes[0] < sizes[1] < sizes[0] + 100


def test_an_uncounted_prompt_that_the_cloud_may_cache_costs_its_reservation() -> None:
    """Cancelled, timed out or killed: the cloud may have written its cache, which costs twice the input price."""
    text = {"type": "text", "text": "word " * 1000, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {"messages": [{"role": "user", "content": [text]}], "max_tokens": 10}
    record = RequestRecord(PRICES, "big")
    call = CloudCall("big", demand_of(record, body, "big", "/chat/completions"), unreported_tokens=10)
    record.cloud_calls.append(call)
    reserved = call.demand.fixed.usd + 10 * OUTPUT / 1e6
    assert reserved > 2 * 5000 * INPUT / 1e6
    assert call.usd(PRICES) == pytest.approx(reserved)
    assert record.cost_usd == pytest.approx(reserved)
    call.counted = ReportedUsage(1000, 5)
    assert call.usd(PRICES) == pytest.approx((1000 * INPUT + 5 * OUTPUT) / 1e6)
