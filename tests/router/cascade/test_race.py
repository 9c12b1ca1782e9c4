"""Race mode: the cloud starts beside the device, whoever loses is stopped, and what it cost is counted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from budget_probe import spent
from cascade_bench import Bench, run, text_of, updraft_of
from router_fakes import CLOUD_TEXT, LOCAL_TEXT, FakeCloud, ScriptedGates, ScriptedLocal
from updraft.router.accounting.budget import BudgetLimits
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.state import Tiers

pytestmark = pytest.mark.usefixtures("short_waits")


async def ask(bench: Any, stream: bool, **fields: Any) -> tuple[str, dict[str, Any]]:
    if stream:
        _, events, done = await bench.stream(**fields)
        assert done
        return text_of(events), updraft_of(events)
    answer = await bench.answer(**fields)
    return answer["choices"][0]["message"]["content"], answer["updraft"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_device_wins_and_the_cloud_is_stopped_and_counted(bench: Any, cloud: FakeCloud, stream: bool) -> None:
    async def test() -> None:
        cloud.delay_s = 30.0
        async with bench(race_above=0.0, budget=BudgetLimits(cloud_tokens=10_000)) as b:
            b.local.delay_s = 0.02
            text, info = await asyncio.wait_for(ask(b, stream), 25.0)
            assert (text, info["route"]) == (LOCAL_TEXT, "local")
            assert "the cloud lost the race" in info["reason"]
            assert (info["cloud_tokens"], info["cost_usd"] > 0) == (6, True), "an estimate: as much as the device wrote"
        assert len(cloud.requests) == 1
        (row,) = b.rows()
        assert (row.cloud_prompt_tokens, row.cloud_tokens, row.status) == (7, 6, 200)

    run(test())


def test_a_live_stream_has_won_when_it_begins(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        cloud.delay_s = 30.0
        async with bench(race_above=0.0, hold_tokens=3) as b:
            text, info = await asyncio.wait_for(ask(b, stream=True), 25.0)
            assert (text, info["route"], info["cloud_tokens"]) == (LOCAL_TEXT, "local", 3)

    run(test())


def test_lost_race_is_counted_before_a_later_hand_over(bench: Any, cloud: FakeCloud) -> None:
    """Begun at 2 tokens, when the cloud lost the race, and handed over at 4."""

    async def test() -> None:
        cloud.delay_s = 2.0
        limited = {"budget": BudgetLimits(cloud_tokens=10_000)}
        async with bench(ScriptedGates(during_at=4), race_above=0.0, hold_tokens=2, **limited) as b:
            b.local.delay_s = 0.05
            text, info = await ask(b, stream=True)
            assert (text, info["route"]) == ("one two three four and the cloud goes on.", "escalated")
            assert info["cost_usd"] == pytest.approx(((7 + 11) * 0.5 + (2 + 6) * 1.5) * 1e-6)
        (row,) = b.rows()
        assert (row.cloud_prompt_tokens, row.cloud_tokens) == (7 + 11, 2 + 6)
        assert spent(b.ledger) == (1, 26, pytest.approx(row.cost_usd))
        assert len(cloud.requests) == 2

    run(test())


class Clinging:
    """A cloud that never answers, and takes its time to be stopped."""

    continues = True

    def __init__(self) -> None:
        self.stopping = asyncio.Event()

    def native_body(self, *_request: Any) -> None:
        """It has no API of its own."""

    async def complete(self, path: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.stopping.set()
            await asyncio.sleep(60)
            raise
        raise AssertionError("it was stopped")

    async def aclose(self) -> None:
        """It holds nothing."""


def test_client_that_leaves_during_a_stopped_race_has_a_row(tmp_path: Path) -> None:
    async def test() -> None:
        config = RouterConfig(ledger=tmp_path / "ledger.sqlite3", race_above=0.0)
        local = ScriptedLocal(delay_s=10.0)
        clinging: Any = Clinging()
        router = Router(config, Tiers(local, clinging, ScriptedGates()))
        await router.start()
        b = Bench(router, local, tmp_path / "ledger.sqlite3")
        task = asyncio.create_task(b.ask(timeout_s=0.2))
        await clinging.stopping.wait()
        assert not task.done(), "its time is over, and the race is being stopped"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await router.close()
        assert [row.status for row in b.rows()] == [504]

    run(test())


@pytest.mark.parametrize("delay_s", [0.1, 30.0])
@pytest.mark.parametrize("stream", [False, True])
def test_the_cloud_wins_and_the_device_is_stopped(bench: Any, cloud: FakeCloud, stream: bool, delay_s: float) -> None:
    """With 30 s the device has not written a token yet."""

    async def test() -> None:
        cloud.delay_s = 0.25
        async with bench(race_above=0.0) as b:
            b.local.delay_s = delay_s
            text, info = await asyncio.wait_for(ask(b, stream), 25.0)
            assert (text, info["route"]) == (CLOUD_TEXT, "cloud")
            assert info["reason"] == "raced: the cloud answered first"
            assert (b.local.finished, b.local.running) == (0, 0)
            assert (info["local_tokens"] > 0) == (delay_s < 1.0)

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_gate_that_escalates_finds_the_cloud_at_work(bench: Any, cloud: FakeCloud, stream: bool) -> None:
    async def test() -> None:
        cloud.delay_s = 0.3
        async with bench(ScriptedGates(after=True), race_above=0.05) as b:
            text, info = await ask(b, stream)
            assert (text, info["route"], info["gate"]) == (CLOUD_TEXT, "cloud", 3)
        assert len(cloud.requests) == 1, "asked once, without a draft"
        assert "prediction" not in cloud.requests[0]

    run(test())


@pytest.mark.parametrize("after", [False, True])
def test_a_cloud_that_fails_in_the_race_leaves_the_local_answer(bench: Any, cloud: FakeCloud, after: bool) -> None:
    async def test() -> None:
        cloud.mode = "500"
        async with bench(ScriptedGates(after=after), race_above=0.0) as b:
            b.local.delay_s = 0.05
            text, info = await ask(b, stream=False)
            assert (text, info["route"], info["cost_usd"]) == (LOCAL_TEXT, "fallback" if after else "local", 0.0)

    run(test())


def test_requests_without_a_race(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(race_above=0.5) as b:
            assert (await b.answer())["updraft"]["route"] == "local", "P(gain) is 0.1"
        async with bench(race_above=0.0) as b:
            await b.answer("local")
            await b.answer(updraft={"private": True})
        async with bench() as b:
            await b.answer()
        assert not cloud.requests

    run(test())


def test_a_caller_who_leaves_stops_both(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        cloud.delay_s = 5.0
        async with bench(race_above=0.0) as b:
            b.local.delay_s = 1.0
            task = asyncio.create_task(b.ask())
            await asyncio.sleep(0.2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert b.local.running == 0
            assert not [each for each in asyncio.all_tasks() if "ask" in repr(each.get_coro())]
        assert [row.status for row in b.rows()] == [499]

    run(test())
