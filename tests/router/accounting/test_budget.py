"""Budgets: no race, restart or failure goes past a limit, and a spent one says so and when it renews."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from budget_probe import spent
from cascade_bench import run
from hypothesis import given
from hypothesis import strategies as st
from ledger_rows import add_row
from router_fakes import FakeCloud, ScriptedGates, unused_url
from updraft.accounting.budget import TokenDemand
from updraft.accounting.prices import Price
from updraft.accounting.token_estimate import answer_size, prompt_tokens
from updraft.protocol.errors import BudgetExceededError, ConfigurationError
from updraft.protocol.http.wire import WireRequest
from updraft.router.accounting.budget import Budget, BudgetLimits, Charge, Demand
from updraft.router.accounting.ledger import REQUESTS, Ledger
from updraft.router.accounting.prices import Prices
from updraft.router.accounting.request_record import RequestRecord
from updraft.router.config import CloudTierConfig, RouterConfig
from updraft.router.request.chat_request import Caller

pytestmark = pytest.mark.usefixtures("short_waits")

ONE = Charge(requests=1, cloud_requests=1, cloud_tokens=100, usd=0.01)
DEMAND = Demand(ONE, 0.0, TokenDemand(0, 0))
ESCALATE = ScriptedGates(before=True)


def read_bound(body: dict[str, Any]) -> int:
    return prompt_tokens(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"), bytes_per_token=1)


@pytest.mark.parametrize("stream", [False, True])
def test_64_at_once_stay_below_the_limit(bench: Any, cloud: FakeCloud, stream: bool) -> None:
    """An answer takes 15 tokens (11 read, 4 written), and at most 100 are expected: 10 fit, 64 want."""

    async def test() -> None:
        async with bench(ESCALATE, budget=BudgetLimits(cloud_tokens=1000)) as b:
            asks = [b.stream(max_tokens=4) if stream else b.ask(max_tokens=4) for _ in range(64)]
            await asyncio.gather(*asks)
        rows = b.rows()
        assert len(rows) == 64
        used = sum(row.cloud_tokens + row.cloud_prompt_tokens for row in rows)
        assert 0 < used <= 1000
        assert spent(b.ledger)[:2] == (len(cloud.requests), used)
        local = [row for row in rows if row.tier == "local"]
        assert len(local) == 64 - len(cloud.requests)
        assert all("budget spent" in row.reason and row.status == 200 for row in local)

    run(test())


def test_a_budget_below_one_request_is_not_said_to_be_spent(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ESCALATE, budget=BudgetLimits(cloud_tokens=3)) as b:
            assert (await b.answer())["updraft"]["reason"].startswith("budget too small: 0 of 3 cloud tokens are used")

    run(test())


def test_a_spent_budget_keeps_auto_local_and_refuses_cloud(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ESCALATE, budget=BudgetLimits(usd=0.0)) as b:
            info = (await b.answer())["updraft"]
            assert (info["route"], info["gate"]) == ("local", 0)
            assert info["reason"].startswith("budget spent: $0 of $0 are used")
            assert "renews at" in info["reason"]
            response = await b.ask("cloud")
            assert response.status == 429
            error = json.loads(response.body)["error"]
            assert (error["code"], error["type"]) == ("budget_exceeded", "rate_limit_error")
            assert 0 < int(response.headers["retry-after"]) <= 86_400
            assert response.headers["x-should-retry"] == "false"
            body = json.dumps({"model": "auto", "input": ["hi"]}).encode()
            embeddings = await b.handle(WireRequest("POST", "/v1/embeddings", body=body))
            assert embeddings.status == 429, "embeddings are the cloud's, so they cost too"
        async with bench(has_local=False, budget=BudgetLimits(usd=0.0)) as b:
            assert (await b.ask()).status == 429
        assert not cloud.requests

    run(test())


def test_each_key_and_user_has_its_own(bench: Any) -> None:
    async def test() -> None:
        async with bench(ESCALATE, budget_per_key=BudgetLimits(cloud_tokens=230), cloud_timeout_s=60.0) as b:
            tiers = [(await b.answer(key=key, max_tokens=1))["updraft"]["tier"] for key in ("a", "b", "a")]
            assert tiers == ["cloud", "cloud", "cloud"]
            tiers = [(await b.answer(key="a", max_tokens=1))["updraft"]["tier"] for _ in range(30)]
            assert tiers[-1] == "local"
            assert (await b.answer(key="b", max_tokens=1))["updraft"]["tier"] == "cloud"
        async with bench(ESCALATE, budget_per_user=BudgetLimits(cloud_share=0.0)) as b:
            assert "of this user" in (await b.answer(user="u"))["updraft"]["reason"]

    run(test())


def test_a_share_is_never_exceeded_by_more_than_rounding(bench: Any) -> None:
    async def test() -> None:
        async with bench(ESCALATE, budget=BudgetLimits(cloud_share=0.25)) as b:
            tiers = [(await b.answer())["updraft"]["tier"] for _ in range(8)]
        assert tiers == ["cloud", "local", "local", "local", "cloud", "local", "local", "local"]

    run(test())


def test_a_restart_changes_nothing(bench: Any) -> None:
    async def test() -> None:
        limits = BudgetLimits(cloud_share=0.5)
        async with bench(ESCALATE) as b:
            assert [(await b.answer())["updraft"]["tier"] for _ in range(3)] == ["cloud"] * 3, "no budget yet"
        async with bench(ESCALATE, budget=limits) as b:
            assert [(await b.answer())["updraft"]["tier"] for _ in range(3)] == ["local"] * 3, "3 of 3 went up today"
        async with bench(ESCALATE, budget=limits) as b:
            assert [(await b.answer())["updraft"]["tier"] for _ in range(2)] == ["cloud", "local"], "3 of 6"

    run(test())


@pytest.mark.parametrize(("mode", "kept"), [("500", False), ("down", False), ("slow", True), ("garbage", True)])
def test_possible_charge_of_a_failed_cloud_stays_reserved(bench: Any, cloud: FakeCloud, mode: str, kept: bool) -> None:
    async def test() -> None:
        cloud.mode = mode
        settings = {"down": {"cloud_url": unused_url()}, "slow": {"cloud_timeout_s": 0.2}}.get(mode, {})
        async with bench(ESCALATE, budget=BudgetLimits(usd=1.0), **settings) as b:
            assert (await b.answer())["updraft"]["route"] == "fallback"
        cloud_requests, tokens, usd = spent(b.ledger)
        assert (cloud_requests == 1, tokens > 1000, usd > 0.001) == (kept, kept, kept)

    run(test())


def test_no_answer_outlives_a_ledger_that_cannot_be_read(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ESCALATE, budget=BudgetLimits(usd=1.0)) as b:
            with sqlite3.connect(b.ledger) as connection:
                connection.execute("DROP TABLE spending")
            connection.close()
            assert "budget unknown" in (await b.answer())["updraft"]["reason"]
        assert not cloud.requests

    run(test())


def test_model_prices_determine_spending(bench: Any) -> None:
    async def test() -> None:
        prices = Prices(models={"pocket-large": Price(input=1000.0, output=10_000.0)})
        async with bench(ESCALATE, prices=prices, budget=BudgetLimits(usd=50.0)) as b:
            info = (await b.answer("cloud"))["updraft"]
            assert info["cost_usd"] == pytest.approx(11 * 1e-3 + 4 * 1e-2)
            local = (await b.answer("local"))["updraft"]
            assert local["saved_usd"] == pytest.approx(7 * 1e-3 + 6 * 1e-2)
        assert spent(b.ledger)[2] == pytest.approx(info["cost_usd"])

    run(test())


def test_processes_on_one_ledger_share_the_limit(tmp_path: Path) -> None:
    """Two connections stand for two processes: SQLite's locks are the same."""
    path, taken = tmp_path / "ledger.sqlite3", []

    def spend() -> None:
        ledger = Ledger(path)
        budget = Budget({"all": BudgetLimits(usd=0.205)}, ledger)
        for _ in range(20):
            with contextlib.suppress(BudgetExceededError):
                taken.append(asyncio.run(budget.reserve(Caller(), DEMAND)))
        ledger.close()

    threads = [threading.Thread(target=spend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 20
    ledger = Ledger(path)
    budget = Budget({"all": BudgetLimits(usd=0.205)}, ledger)
    with ledger.transaction() as connection:
        connection.executemany(REQUESTS.booking, budget.bookings(Caller(), taken[0], replace(ONE, usd=0.001)))
    assert asyncio.run(budget.exceeded(Caller(), DEMAND)) is None, "what was not used is free again"
    ledger.close()


def test_a_new_day_is_a_new_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000 * 86_400 + 80_000
    monkeypatch.setattr("updraft.router.accounting.budget.time.time", lambda: now)
    ledger = Ledger(tmp_path / "ledger.sqlite3")
    budget = Budget({"key": BudgetLimits(cloud_tokens=100)}, ledger)
    reserved = asyncio.run(budget.reserve(Caller("k"), DEMAND))
    error = asyncio.run(budget.exceeded(Caller("k"), DEMAND))
    assert error is not None
    assert error.retry_after_s == 6400
    assert "1972-09-28 00:00 UTC" in error.message
    assert asyncio.run(budget.exceeded(Caller("other"), DEMAND)) is None
    now += 10_000
    assert asyncio.run(budget.exceeded(Caller("k"), DEMAND)) is None
    with ledger.transaction() as connection:
        connection.executemany(REQUESTS.booking, budget.bookings(Caller("k"), reserved, replace(ONE, cloud_tokens=99)))
    assert asyncio.run(budget.exceeded(Caller("k"), DEMAND)) is None, "yesterday's request is settled with yesterday"
    ledger.close()


def test_a_clock_that_runs_ahead_deletes_no_spending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was in flight meanwhile is settled once the clock is right again."""
    now = true_now = datetime(2027, 1, 15, tzinfo=UTC).timestamp()
    monkeypatch.setattr("updraft.router.accounting.budget.time.time", lambda: now)
    ledger = Ledger(tmp_path / "ledger.sqlite3")
    budget = Budget({"all": BudgetLimits(cloud_tokens=1000, period="month")}, ledger)
    reserved = asyncio.run(budget.reserve(Caller(), DEMAND))
    now += 40 * 86_400
    asyncio.run(budget.reserve(Caller(), DEMAND))
    now = true_now
    with ledger.transaction() as connection:
        connection.executemany(REQUESTS.booking, budget.bookings(Caller(), reserved, replace(ONE, cloud_tokens=70)))
        (spent,) = connection.execute("SELECT cloud_tokens FROM spending WHERE day = ?", (true_now // 86_400 - 14,))
    assert spent == (70,)
    ledger.close()


def test_a_month_is_a_calendar_month_and_begins_with_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime(2027, 1, 31, 23, tzinfo=UTC).timestamp()
    monkeypatch.setattr("updraft.router.accounting.budget.time.time", lambda: now)
    ledger = Ledger(tmp_path / "ledger.sqlite3")
    row = RequestRecord(Prices(), "big").row(200)
    first, before = (datetime(*day, tzinfo=UTC).timestamp() for day in ((2027, 1, 1), (2026, 12, 31, 23)))
    add_row(ledger, replace(row, id="this", started_at=first, cloud_tokens=60))
    add_row(ledger, replace(row, id="last", started_at=before, cloud_tokens=60))
    month = Budget({"all": BudgetLimits(cloud_tokens=200, period="month")}, ledger)
    day = Budget({"all": BudgetLimits(cloud_tokens=100)}, ledger)
    assert month.counts_from(now) == first
    reserved = asyncio.run(month.reserve(Caller(), DEMAND))
    error = asyncio.run(month.exceeded(Caller(), DEMAND))
    assert error is not None and error.retry_after_s == 3600
    assert "160 of 200 cloud tokens" in error.message
    assert "this month; the budget renews at 2027-02-01 00:00 UTC" in error.message
    assert asyncio.run(day.exceeded(Caller(), DEMAND)) is None, "a day of the same scope counts for itself"
    now = datetime(2027, 2, 1, tzinfo=UTC).timestamp()
    assert asyncio.run(month.exceeded(Caller(), DEMAND)) is None
    with ledger.transaction() as connection:
        connection.executemany(REQUESTS.booking, month.bookings(Caller(), reserved, ONE))
        totals = connection.execute("SELECT cloud_tokens FROM spending WHERE period = 'month' ORDER BY day").fetchall()
    assert totals == [(160,), (0,)], "settled with the month that it was reserved in"
    ledger.close()


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (BudgetLimits(cloud_tokens=1, period="month"), {"month", "yesterday", "new"}),
        (BudgetLimits(), {"yesterday", "new"}),
    ],
)
def test_old_rows_go_unless_a_running_budget_counts_them(bench: Any, budget: BudgetLimits, kept: set[str]) -> None:
    """Rows of the running month are far older than the retention where the clock says the 28th."""

    async def test() -> None:
        async with bench(ESCALATE, ledger_days=None) as b:
            row = RequestRecord(Prices(), "big").row(200)
        now = datetime(2027, 1, 28, tzinfo=UTC).timestamp()
        ledger = Ledger(b.ledger)
        for index in range(450):
            add_row(ledger, replace(row, id=f"old-{index}", started_at=now - 40 * 86_400))
        add_row(ledger, replace(row, id="month", started_at=now - 20 * 86_400))
        add_row(ledger, replace(row, id="yesterday", started_at=now - 86_400))
        add_row(ledger, replace(row, id="new", started_at=now))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("updraft.router.router.time.time", lambda: now)
            async with bench(ESCALATE, ledger_days=10, budget=budget):
                for _ in range(1500):
                    await asyncio.sleep(0.02)
                    if {each.id for each in ledger.rows(limit=500)} == kept:
                        break
                else:
                    raise AssertionError([each.id for each in ledger.rows(limit=500)])
        ledger.close()

    run(test())


@given(text=st.text(max_size=200), limit=st.integers(1, 9999), n=st.integers(1, 8))
def test_the_expected_tokens_are_a_bound(text: str, limit: int, n: int) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": limit, "n": n}
    assert read_bound(body) >= len(text.encode("utf-8", "replace"))
    size = answer_size(body, "chat/completions")
    assert size.most(None) == limit * n
    assert answer_size({"max_tokens": float(limit), "n": float(n)}, "chat/completions") == size


LARGE = "data:image/png;base64," + "A" * 10**6
IMAGE = {"type": "image_url", "image_url": {"url": LARGE, "detail": "low"}}


@pytest.mark.parametrize(
    "part",
    [
        IMAGE,
        {"type": "input_audio", "input_audio": {"data": LARGE, "format": "wav"}},
        {"type": "file", "file": {"file_data": LARGE, "filename": "a.pdf"}},
        {"type": "file", "file": {"file_id": "file-1"}},
    ],
)
def test_attachments_have_their_own_token_bound(part: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": "x", "n": True}
    assert 1500 < read_bound(body) < 2000
    assert answer_size(body, "chat/completions").least == 1024


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": LARGE}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LARGE}]}]},
        {"messages": [{"role": "user", "content": [IMAGE | {"text": LARGE}]}]},
        {"messages": [{"role": "user", "content": [{"type": ["file"], "file": {"file_data": LARGE}}]}]},
        {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "file", "file": {"file_data": LARGE}}]},
        {"input": [LARGE]},
    ],
)
def test_fake_attachments_are_counted_by_bytes(fields: dict[str, Any]) -> None:
    assert read_bound(fields) >= len(LARGE)


@pytest.mark.parametrize(
    "limits", [{"usd": -1}, {"cloud_tokens": -1}, {"cloud_share": 1.5}, {"usd": float("nan")}, {"period": "week"}]
)
def test_limits_that_mean_nothing_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="budget"):
        BudgetLimits(**limits)


def test_dollars_need_prices(tmp_path: Path) -> None:
    """With a budget in dollars, no cloud of the configuration may be without a price."""
    url, ledger = unused_url(), tmp_path / "ledger.sqlite3"
    priced = Prices(models={"big": Price(1.0, 2.0)})
    middle_tiers = (CloudTierConfig(url, "small"),)
    for settings, missing in (
        ({"cloud_model": "new", "prices": priced}, "new"),
        ({"cloud_model": "big", "prices": priced, "middle_tiers": middle_tiers}, "small"),
    ):
        for limits in ("budget", "budget_per_key", "budget_per_user"):
            with pytest.raises(ConfigurationError, match=rf"'{missing}' has no price.*\[prices.models.\"{missing}\"\]"):
                RouterConfig(cloud_url=url, ledger=ledger, **{limits: BudgetLimits(usd=1.0)}, **settings)
    RouterConfig(cloud_url=url, ledger=ledger, cloud_model="big", prices=priced, budget=BudgetLimits(usd=1.0))
    RouterConfig(cloud_url=url, ledger=ledger, cloud_model="new", budget=BudgetLimits(cloud_tokens=1))
    RouterConfig(ledger=ledger, budget=BudgetLimits(usd=1.0))
    with pytest.raises(ConfigurationError, match=r"'new' has no price.*the target cost"):
        RouterConfig(cloud_url=url, cloud_model="new", prices=priced, cost=1.0)


def test_without_prices_a_cost_is_unknown_not_a_number(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ESCALATE, prices=Prices()) as b:
            response = await b.ask("cloud")
            info = json.loads(response.body)["updraft"]
            assert (info["cost_usd"], info["saved_usd"], info["cloud_tokens"]) == (None, None, 4)
            assert not {"x-updraft-cost-usd", "x-updraft-saved-usd"} & set(response.headers)
            info = (await b.answer("local"))["updraft"]
            assert (info["cost_usd"], info["saved_usd"]) == (0.0, None), "the device is free, the cloud's price unknown"
        assert [(row.cost_usd, row.saved_usd) for row in b.rows()] == [(0.0, None), (None, None)]

    run(test())


def test_a_budget_needs_a_ledger() -> None:
    with pytest.raises(ConfigurationError, match="ledger must be a file"):
        RouterConfig(budget=BudgetLimits(usd=1.0))


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 2**63}, {"max_tokens": 2**62, "n": 8}, {"max_completion_tokens": 10**30}]
)
@pytest.mark.parametrize("model", ["cloud", "auto"])
def test_no_request_is_too_large_to_be_counted(bench: Any, model: str, fields: dict[str, int]) -> None:
    async def test() -> None:
        async with bench(ESCALATE, budget=BudgetLimits(cloud_share=1.0)) as b:
            for _ in range(2):
                response = await b.ask(model, **fields)
                assert response.status in (200, 400), response.body
        rows = b.rows()
        assert len(rows) == 2

    run(test())


def test_each_prompt_embedding_is_a_prompt() -> None:
    size = answer_size({"prompt_embeds": ["AA", "BB", "CC"], "max_tokens": 10}, "completions")
    assert size.most(None) >= 30
