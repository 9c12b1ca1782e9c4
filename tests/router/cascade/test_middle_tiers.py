"""Three tiers: the device, a middle cloud, and the best one, each a server of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from budget_probe import spent
from cascade_bench import run, text_of, updraft_of
from router_fakes import CLOUD_TEXT, LOCAL_TEXT, FakeCloud, ScriptedGates, running_cloud
from updraft.accounting.prices import Price
from updraft.router.accounting.budget import BudgetLimits
from updraft.router.accounting.prices import Prices
from updraft.router.config import CloudTierConfig


@pytest.fixture(scope="module")
def medium_server() -> Iterator[FakeCloud]:
    with running_cloud() as cloud:
        yield cloud


@pytest.fixture
def medium(medium_server: FakeCloud) -> FakeCloud:
    medium_server.mode = "healthy"
    medium_server.delay_s = 0.0
    medium_server.requests.clear()
    medium_server.authorizations.clear()
    return medium_server


@pytest.mark.parametrize("stream", [False, True])
def test_a_spent_budget_of_dollars_does_not_block_a_model_without_cost(
    bench: Any, cloud: FakeCloud, medium: FakeCloud, stream: bool
) -> None:
    tiers = {"middle_tiers": (CloudTierConfig(medium.url, "medium", price=Price(0, 0)),)}
    spent_up = {"prices": Prices(models={"pocket-large": Price(1, 1)}), "budget": BudgetLimits(usd=0.0)}

    async def test() -> None:
        async with bench(has_local=False, **tiers, **spent_up) as b:
            for model in ("medium", "auto"):
                assert (await b.ask(model, stream=stream)).status == 200, model
            assert (await b.ask("pocket-large", stream=stream)).status == 429
        assert len(medium.requests) == 2

    run(test())


def settings(medium: FakeCloud, **more: Any) -> dict[str, Any]:
    return {"middle_tiers": (CloudTierConfig(medium.url, "medium", "sk-medium", Price(0.1, 0.1), **more),)}


@pytest.mark.parametrize("stream", [False, True])
def test_one_up_at_a_time(bench: Any, cloud: FakeCloud, medium: FakeCloud, stream: bool) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(after=True), cloud_api_key="sk-top", **settings(medium)) as b:

            async def ask() -> tuple[str, dict[str, Any]]:
                if stream:
                    _, events, _ = await b.stream()
                    return text_of(events), updraft_of(events)
                answer = await b.answer()
                return answer["choices"][0]["message"]["content"], answer["updraft"]

            text, info = await ask()
            assert (text, info["route"], len(cloud.requests)) == (CLOUD_TEXT, "escalated", 0)
            assert info["cost_usd"] == pytest.approx(15 * 0.1e-6)
            assert info["saved_usd"] == pytest.approx((11 * 0.5 + 4 * 1.5) * 1e-6 - info["cost_usd"])
            medium.mode = "500"
            text, info = await ask()
            assert (text, info["route"], len(cloud.requests)) == (CLOUD_TEXT, "escalated", 1)
            assert info["cost_usd"] == pytest.approx((11 * 0.5 + 4 * 1.5) * 1e-6)
            cloud.mode = "500"
            text, info = await ask()
            assert (text, info["route"]) == (LOCAL_TEXT, "fallback")
        third, second, first = b.rows()
        assert [row.cloud_model for row in (first, second, third)] == ["medium", "pocket-large", "pocket-large"]
        reasons = [each["reason"] for each in json.loads(second.decisions)]
        assert reasons[-1] == "next cloud: medium failed: the server answered 500"
        assert [body["model"] for body in medium.requests] == ["medium"] * 7, "one body that fails is no outage"
        assert all(body["prediction"]["content"] == LOCAL_TEXT for body in (*medium.requests, *cloud.requests))
        assert (set(medium.authorizations), set(cloud.authorizations)) == ({"Bearer sk-medium"}, {"Bearer sk-top"})

    run(test())


def test_a_failing_middle_cloud_is_reported(
    bench: Any, cloud: FakeCloud, medium: FakeCloud, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer, the ledger and the log say why the dearer cloud answers. The log says it once."""

    async def test() -> None:
        async with bench(ScriptedGates(after=True), **settings(medium)) as b:
            for medium.mode in ("500", "500", "healthy", "500"):
                info = (await b.answer())["updraft"]
                failed = "; medium failed: the server answered 500" * (medium.mode == "500")
                assert info["reason"] == f"gate 3{failed}"
                assert b.rows()[0].failure == failed.removeprefix("; ")
        assert len(cloud.requests) == 3
        logged = [record.message for record in caplog.records if "medium" in record.message]
        assert logged == ["medium failed: the server answered 500, so requests go to the next cloud"] * 2

    run(test())


def test_hard_requests_skip_middle_tiers(bench: Any, cloud: FakeCloud, medium: FakeCloud) -> None:
    async def test() -> None:
        for skip_above, server in ((0.95, medium), (0.5, cloud)):
            async with bench(ScriptedGates(before=True), **settings(medium, skip_above=skip_above)) as b:
                before = len(server.requests)
                await b.answer()
                assert len(server.requests) == before + 1, "P(gain) is 0.9"

    run(test())


def test_a_cloud_that_is_named_is_the_one_that_is_asked(bench: Any, cloud: FakeCloud, medium: FakeCloud) -> None:
    async def test() -> None:
        async with bench(**settings(medium)) as b:
            assert (await b.answer("medium"))["updraft"]["route"] == "cloud"
            assert (len(medium.requests), len(cloud.requests)) == (1, 0)
            await b.answer("cloud")
            assert (len(medium.requests), len(cloud.requests)) == (1, 1)
            medium.mode = "500"
            assert (await b.ask("medium")).status == 500, "nobody is put in its place"
            assert len(cloud.requests) == 1

    run(test())


def test_a_live_answer_is_handed_over_to_the_lowest_that_works(bench: Any, cloud: FakeCloud, medium: FakeCloud) -> None:
    async def test() -> None:
        medium.mode = "garbage-stream"
        for continues in (True, False):
            async with bench(ScriptedGates(during_at=4), hold_tokens=2, **settings(medium, continues=continues)) as b:
                _, events, done = await b.stream()
                assert done
                assert text_of(events) == "one two three four and the cloud goes on."
        assert (len(medium.requests), len(cloud.requests)) == (1, 2), "only one that continues is asked to"

    run(test())


@pytest.mark.parametrize(("mode", "route", "expected"), [("healthy", "escalated", 15), ("500", "fallback", 0)])
def test_every_cloud_that_may_have_charged_is_counted(
    bench: Any, cloud: FakeCloud, medium: FakeCloud, mode: str, route: str, expected: int
) -> None:
    async def test() -> None:
        medium.mode, cloud.mode = "slow", mode
        limited = {"budget": BudgetLimits(cloud_tokens=10_000), "cloud_timeout_s": 0.5}
        async with bench(ScriptedGates(after=True), **limited, **settings(medium)) as b:
            assert (await b.answer(max_tokens=1000))["updraft"]["route"] == route
        cloud_requests, tokens, _ = spent(b.ledger)
        assert (cloud_requests, len(cloud.requests)) == (1, 1)
        assert 1000 + expected < tokens < 1500 + expected, "what the middle tier was sent stays reserved"

    run(test())


def test_the_next_cloud_is_asked_only_if_it_can_be_paid_too(bench: Any, cloud: FakeCloud, medium: FakeCloud) -> None:
    async def test() -> None:
        medium.mode = "slow"
        limited = {"budget": BudgetLimits(cloud_tokens=2000), "cloud_timeout_s": 0.5}
        async with bench(ScriptedGates(after=True), **limited, **settings(medium)) as b:
            info = (await b.answer(max_tokens=1000))["updraft"]
            assert info["route"] == "fallback"
            assert "budget spent" in info["reason"]
        assert not cloud.requests
        assert 1000 < spent(b.ledger)[1] < 1500

    run(test())


def test_a_middle_cloud_is_reserved_at_its_own_price(bench: Any, cloud: FakeCloud, medium: FakeCloud) -> None:
    async def test() -> None:
        dear = {"prices": Prices(cloud_input=1000.0, cloud_output=1000.0), "budget": BudgetLimits(usd=0.01)}
        async with bench(ScriptedGates(after=True), **dear, **settings(medium)) as b:
            assert (await b.answer())["updraft"]["route"] == "escalated"
            medium.mode = "500"
            answer = await b.answer()
            assert "budget spent" in answer["updraft"]["reason"], "the best one is too dear"
        assert not cloud.requests

    run(test())


def test_budget_left_by_a_refusal_pays_the_next_cloud(bench: Any, cloud: FakeCloud, medium: FakeCloud) -> None:
    async def test() -> None:
        medium.mode = "500"
        async with bench(ScriptedGates(after=True), budget=BudgetLimits(cloud_tokens=2000), **settings(medium)) as b:
            assert (await b.answer(max_tokens=1000))["updraft"]["route"] == "escalated"
        assert spent(b.ledger)[:2] == (1, 15)

    run(test())


@pytest.mark.parametrize(("skip_above", "top"), [(0.95, 0), (0.8, 1)])
def test_a_race_is_not_won_by_a_cloud_that_the_last_gate_rules_out(
    bench: Any, cloud: FakeCloud, medium: FakeCloud, skip_above: float, top: int
) -> None:
    """P(gain) is 0.1 at gate 1, where the race with the middle tier begins, and 0.9 at gate 3."""

    async def test() -> None:
        medium.delay_s = 1.5
        async with bench(ScriptedGates(after=True), race_above=0.05, **settings(medium, skip_above=skip_above)) as b:
            b.local.delay_s = 0.05
            answer = await b.answer()
        assert answer["choices"][0]["message"]["content"] == CLOUD_TEXT
        assert (len(medium.requests), len(cloud.requests)) == (1, top)
        (row,) = b.rows()
        assert ("ruled out the raced cloud" in row.reason) == bool(top)
        estimated = (7, 6) if top else (0, 0)
        assert (row.cloud_prompt_tokens, row.cloud_tokens) == (11 + estimated[0], 4 + estimated[1])
        if top:
            assert cloud.requests[0]["prediction"]["content"] == LOCAL_TEXT

    run(test())
