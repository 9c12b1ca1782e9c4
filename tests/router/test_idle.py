"""The local model leaves memory while it is idle, never under a request, and settings change between requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cascade_bench import Bench, run
from router_fakes import FakeCloud, ScriptedGates, ScriptedLocal, SlowEngine, tiers
from updraft.protocol.errors import ConfigurationError, OverloadedError
from updraft.protocol.sampling import SamplingParams
from updraft.router.accounting.budget import BudgetLimits
from updraft.router.config import RouterConfig
from updraft.router.privacy.rules import Privacy
from updraft.router.router import Router
from updraft.router.tiers.local import EngineLocalTier


async def unloaded(tier: EngineLocalTier) -> None:
    while tier.loaded:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_a_model_is_loaded_again_once_for_all_who_come() -> None:
    loads: list[SlowEngine] = []

    def load() -> SlowEngine:
        loads.append(SlowEngine())
        return loads[-1]

    async def test() -> None:
        tier = EngineLocalTier(first := SlowEngine(), load, idle_s=0.05)
        busy = await tier.start([], SamplingParams())
        await asyncio.sleep(0.2)
        assert not first.closed
        await busy.aclose()
        await busy.aclose()
        await unloaded(tier)
        assert first.closed
        runs = await asyncio.gather(*(tier.start([], SamplingParams()) for _ in range(5)))
        assert [token async for token in runs[0]]
        assert len(loads) == 1
        assert tier.model_id == first.model_id
        for each in runs:
            await each.aclose()
        await tier.aclose()
        assert loads[0].closed

    run(test())


def test_a_model_that_does_not_come_back_is_tried_again_by_the_next() -> None:
    tries: list[Any] = [OSError("gone"), SlowEngine()]

    def load() -> SlowEngine:
        outcome = tries.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def test() -> None:
        tier = EngineLocalTier(SlowEngine(), load, idle_s=0.01)
        await unloaded(tier)
        with pytest.raises(OSError, match="gone"):
            await tier.start([], SamplingParams())
        await (await tier.start([], SamplingParams())).aclose()
        await tier.aclose()

    run(test())


def test_sleep_and_pin() -> None:
    async def test() -> None:
        tier = EngineLocalTier(SlowEngine(), SlowEngine, idle_s=0.02)
        tier.pin(True)
        await asyncio.sleep(0.1)
        assert tier.loaded
        busy = await tier.start([], SamplingParams())
        with pytest.raises(OverloadedError, match="answering"):
            await tier.sleep()
        await busy.aclose()
        await tier.sleep()
        assert not tier.loaded
        await (await tier.start([], SamplingParams())).aclose()
        tier.pin(False)
        await unloaded(tier)
        await tier.aclose()
        always = EngineLocalTier(SlowEngine(), SlowEngine, idle_s=None)
        with pytest.raises(ConfigurationError, match="local_idle_s"):
            always.pin(False)
        await always.aclose()

    run(test())


def test_new_settings_hold_from_the_next_request_on(cloud: FakeCloud, tmp_path: Path) -> None:
    config = RouterConfig(cloud_url=cloud.url, cloud_model="pocket-large", ledger=tmp_path / "ledger.sqlite3")

    async def test() -> None:
        local = ScriptedLocal()
        router = Router(config, tiers(local, config, ScriptedGates()))
        bench = Bench(router, local, tmp_path / "ledger.sqlite3")
        assert (await bench.ask("cloud")).status == 200
        limited = replace(config, budget=BudgetLimits(cloud_tokens=0), privacy=Privacy(patterns={"greeting": "hello"}))
        assert await router.reconfigure(limited) == ["budget", "privacy"]
        assert (await bench.answer("cloud", messages=[{"role": "user", "content": "other"}]))["error"]["code"] == (
            "budget_exceeded"
        )
        assert (await bench.answer("cloud"))["error"]["code"] == "private"
        with pytest.raises(ConfigurationError, match="cloud_url cannot change while the router runs"):
            await router.reconfigure(replace(config, cloud_url="http://127.0.0.1:1"))
        assert (await bench.answer("cloud"))["error"]["code"] == "private"
        await router.close()

    run(test())
