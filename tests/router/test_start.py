"""A router loads everything once: who stops waiting leaves it to the next, and has a row in the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import updraft
from cascade_bench import Bench, run
from router_fakes import FakeCloud, ScriptedGates, ScriptedLocal, tiers
from updraft.protocol.errors import ConfigurationError, ModelLoadError, OverloadedError
from updraft.protocol.http.wire import WireRequest
from updraft.router.accounting.prices import Prices
from updraft.router.config import RouterConfig
from updraft.router.factory import check_startable
from updraft.router.router import Router
from updraft.router.state import Tiers
from updraft.router.tiers.cloud import HttpCloudTier

Load = Callable[[RouterConfig], Awaitable[Tiers]]


@pytest.fixture
def cold(cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Load, ScriptedLocal], Bench]:
    """A router that has loaded nothing yet, and will load with `load`."""

    def make(load: Load, local: ScriptedLocal) -> Bench:
        monkeypatch.setattr("updraft.router.router.load_tiers", load)
        ledger = tmp_path / "ledger.sqlite3"
        return Bench(
            Router(RouterConfig(cloud_url=cloud.url, cloud_model="pocket-large", ledger=ledger)), local, ledger
        )

    return make


def test_cancelled_waiter_does_not_cancel_the_load(cold: Any) -> None:
    local, loads, go_on = ScriptedLocal(), [], asyncio.Event()

    async def load(config: RouterConfig) -> Tiers:
        loads.append(config)
        await go_on.wait()
        return tiers(local, config, ScriptedGates())

    async def test() -> None:
        b = cold(load, local)
        assert (await b.ask(timeout_s=0.2)).status == 504
        embeds = await b.handle(WireRequest("POST", "/v1/embeddings", {}, b"{}", 0.1))
        assert embeds.status == 504
        leaves = asyncio.create_task(b.ask())
        await asyncio.sleep(0.02)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        go_on.set()
        assert (await b.answer())["updraft"]["route"] == "local"
        await b.router.close()
        assert len(loads) == 1
        assert sorted(row.status for row in b.rows()) == [200, 499, 504, 504]
        assert local.closed

    run(test())


def test_failed_load_has_a_row_and_is_retried(cold: Any) -> None:
    local, failures = ScriptedLocal(), [ModelLoadError("The file is cut off.")]

    async def load(config: RouterConfig) -> Tiers:
        if failures:
            raise failures.pop()
        return tiers(local, config, ScriptedGates())

    async def test() -> None:
        b = cold(load, local)
        assert (await b.answer())["error"]["message"] == "The file is cut off."
        assert (await b.answer())["updraft"]["route"] == "local"
        await b.router.close()
        assert [row.status for row in b.rows()] == [200, 500]

    run(test())


def test_a_deadline_begins_when_the_request_comes(cold: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    local, left = ScriptedLocal(), []
    complete = HttpCloudTier.complete

    async def told(tier: HttpCloudTier, *request: Any, timeout_s: float, **options: Any) -> Any:
        left.append(timeout_s)
        return await complete(tier, *request, timeout_s=timeout_s, **options)

    async def load(config: RouterConfig) -> Tiers:
        await asyncio.sleep(0.3)
        return tiers(local, config, ScriptedGates())

    async def test() -> None:
        b = cold(load, local)
        assert (await b.ask("cloud", timeout_s=30.0)).status == 200
        (left_s,) = left
        assert left_s < 30.0 - 0.29, "the cloud has what the loading left"
        await b.router.close()

    monkeypatch.setattr(HttpCloudTier, "complete", told)
    run(test())


def test_a_close_while_it_loads_leaves_nothing_open(cold: Any) -> None:
    local = ScriptedLocal()

    async def load(config: RouterConfig) -> Tiers:
        await asyncio.sleep(0.2)
        return tiers(local, config, ScriptedGates())

    async def test() -> None:
        b = cold(load, local)
        waits = asyncio.create_task(b.ask())
        await asyncio.sleep(0.02)
        await b.router.close()
        assert local.closed
        assert (await waits).status == 503
        with pytest.raises(OverloadedError):
            await b.router.start()

    run(test())


PRICES = Prices(cloud_input=0.5, cloud_output=1.5)
CLOUD: dict[str, Any] = {"cloud_url": "http://127.0.0.1:9", "cloud_model": "big"}


@pytest.mark.parametrize("settings", [{}, {"cloud_model": "big"}, {**CLOUD, "offline": True}])
def test_a_router_without_a_tier_says_what_to_set(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        updraft.OpenAI(config=RouterConfig(**settings))
    with pytest.raises(ConfigurationError):
        updraft.AsyncOpenAI(config=RouterConfig(**settings))
    for name in ("local", "cloud_url", "UPDRAFT_LOCAL", "UPDRAFT_CLOUD_URL", "updraft pull", "config.toml"):
        assert name in caught.value.message
    assert ("offline" in caught.value.message) == ("offline" in settings)


@pytest.mark.parametrize("target", [{"quality": 0.5}, {"cloud_share": 0.3}, {"cost": 1.0, "prices": PRICES}])
@pytest.mark.parametrize("local", [None, "pocket"])
def test_a_target_without_a_policy_is_refused_at_once(
    target: dict[str, Any], local: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="updraft calibrate"):
        updraft.OpenAI(config=RouterConfig(local=local, **CLOUD, **target))
    with pytest.raises(ConfigurationError, match="updraft calibrate"):
        run(Router(RouterConfig(local=local, **CLOUD, **target)).start())
    check_startable(RouterConfig(local=local, **CLOUD))
    check_startable(RouterConfig(local=local, **CLOUD, confidence=0.8))


def test_the_pocket_pair_has_a_policy() -> None:
    pair = {"local": "pocket", "cloud_url": "http://127.0.0.1:9", "cloud_model": "pocket-large"}
    for target in ({"quality": 0.98}, {"cloud_share": 0.3}, {"cost": 1.0, "prices": PRICES}, {}):
        check_startable(RouterConfig(**pair, **target))  # type: ignore[arg-type]
