"""Deadlines: what the tiers were seen to take decides which of them a request in a hurry asks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from cascade_bench import Bench, run
from router_fakes import FakeCloud, ScriptedGates
from updraft.protocol.errors import ContextLengthError
from updraft.router.config import LocalModelOptions
from updraft.router.gates.exploration import ExplorationGates
from updraft.router.gates.rules import LatencyEstimates, plan
from updraft.router.tiers import failures


@pytest.mark.parametrize(
    ("remaining", "local", "cloud", "tiers"),
    [
        (2.0, None, 5.0, "both"),
        (2.0, 5.0, None, "both"),
        (2.0, 1.0, 0.9, "both"),
        (2.0, 1.5, 1.0, "one"),
        (2.0, 1.5, 3.0, "local"),
        (2.0, 3.0, 1.5, "cloud"),
        (2.0, 3.0, 4.0, "local"),
        (2.0, 4.0, 3.0, "cloud"),
        (float("inf"), 1e9, 1e9, "both"),
    ],
)
def test_the_plan(remaining: float, local: float | None, cloud: float | None, tiers: str) -> None:
    assert plan(remaining, local, cloud).tiers == tiers


def test_the_pace_is_what_nine_in_ten_took_lately() -> None:
    latency = LatencyEstimates()
    assert latency.expected_s("local") is None
    for seconds in [100.0] * 64 + [1.0] * 60 + [9.0] * 4:
        latency.observe("local", seconds)
    assert latency.expected_s("local") == 1.0
    assert latency.expected_s("cloud") is None


def test_a_queue_on_the_device_takes_its_time() -> None:
    latency = LatencyEstimates()
    assert latency.local_s(8) is None
    latency.observe("local", 2.0)
    for running, seconds in ((0, 2.0), (7, 2.0), (8, 4.0), (16, 6.0)):
        latency.on_device = running
        assert latency.local_s(8) == seconds


def test_a_full_device_overflows_to_the_cloud(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(), local_options=LocalModelOptions(max_num_seqs=2)) as b:
            took(b, local_s=60.0, cloud_s=1.0)
            assert (await b.answer(timeout_s=90.0))["updraft"]["tier"] == "local"
            b.local.hangs_at = 0
            waiting = [asyncio.create_task(b.ask()) for _ in range(2)]
            for _ in range(20_000):  # turns of the event loop, until both run
                await asyncio.sleep(0)
                if b.local.running == 2:
                    break
            info = (await b.answer(timeout_s=90.0))["updraft"]
            assert (info["tier"], info["gate"]) == ("cloud", 0)
            assert "the device takes 120.0 s" in info["reason"]
            assert (await b.answer(timeout_s=300.0, model="cloud"))["updraft"]["tier"] == "cloud"
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert b.router._latency.on_device == 0

    run(test())


def took(bench: Bench, *, local_s: float, cloud_s: float) -> None:
    """The tiers were seen to take this: far more than they do here, so that a busy machine makes no difference."""
    bench.router._latency.observe("local", local_s)
    bench.router._latency.observe("cloud", cloud_s)


def test_a_request_in_a_hurry_tries_one_tier(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(after=True)) as b:
            first = (await b.answer(timeout_s=80.0))["updraft"]
            assert (first["route"], b.local.started, len(cloud.requests)) == ("escalated", 1, 1), "nobody knows yet"
            took(b, local_s=60.0, cloud_s=40.0)
            info = (await b.answer(timeout_s=80.0))["updraft"]
            assert (info["route"], info["gate"]) == ("local", 1), "gate 1 would rather have the device"
            assert "there is time for only one tier" in info["reason"]
            assert (b.local.started, len(cloud.requests)) == (2, 1)
            info = (await b.answer(timeout_s=55.0))["updraft"]
            assert (info["tier"], info["gate"], "the cloud is faster" in info["reason"]) == ("cloud", 0, True)
            assert (b.local.started, len(cloud.requests)) == (2, 2)
            assert (await b.answer(timeout_s=300.0))["updraft"]["route"] == "escalated", "with time, both again"

    run(test())


def test_the_coin_is_not_thrown_in_a_hurry(bench: Any, cloud: FakeCloud, tmp_path: Path) -> None:
    """A sampled request takes the time of both tiers. Without enough time, gate 1 decides which tier answers."""

    async def test() -> None:
        gates = ExplorationGates(ScriptedGates(before=True), exploration=1.0)
        async with bench(gates, experience=tmp_path / "experience.sqlite3") as b:
            explored = (await b.answer(timeout_s=90.0))["updraft"]
            assert (explored["route"], explored["reason"]) == ("escalated", "exploration: would escalate, gate 3")
            took(b, local_s=60.0, cloud_s=40.0)
            info = (await b.answer(timeout_s=90.0))["updraft"]
            assert (info["route"], info["gate"], b.local.started) == ("cloud", 1, 1), "the device was not asked"
            assert info["reason"].startswith("gate 1; deadline")

    run(test())


def test_a_hurry_forbids_no_answer(bench: Any, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier that was chosen fails at once: there is time for the other one after all."""
    monkeypatch.setattr(failures, "_BACKOFF_S", (100.0, 100.0))  # no time for another try

    async def test() -> None:
        async with bench(ScriptedGates(after=True)) as b:
            took(b, local_s=60.0, cloud_s=40.0)
            cloud.mode = "500"
            assert (await b.answer(timeout_s=55.0))["updraft"]["route"] == "fallback"
            cloud.mode = "healthy"
            b.local.fails_at, b.local.error = 0, ContextLengthError("too long")
            response = await b.ask(timeout_s=80.0)
            assert json.loads(response.body)["updraft"]["tier"] == "cloud"

    run(test())


def test_a_slow_cloud_is_remembered(bench: Any, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seconds count as minutes, so that a deadline between the two tiers is far from both."""
    observe = LatencyEstimates.observe

    def in_minutes(latency: LatencyEstimates, work: str, seconds: float) -> None:
        observe(latency, work, seconds * (1 if work == "local" else 60))

    monkeypatch.setattr(LatencyEstimates, "observe", in_minutes)

    async def test() -> None:
        cloud.mode = "slow"
        async with bench(ScriptedGates(after=True), cloud_timeout_s=1.0) as b:
            assert (await b.answer(timeout_s=90.0))["updraft"]["route"] == "fallback"
            info = (await b.answer(timeout_s=50.0))["updraft"]
            assert (info["route"], "the device is faster" in info["reason"]) == ("local", True)
        assert len(cloud.requests) == 1

    run(test())
