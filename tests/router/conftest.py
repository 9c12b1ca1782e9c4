"""Fixtures of the router tests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cascade_bench import Bench
from cloud_fixture import cloud, cloud_server
from router_fakes import FakeCloud, ScriptedGates, ScriptedLocal, tiers
from updraft.router.accounting.prices import Prices
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.tiers import failures

__all__ = ["cloud", "cloud_server"]


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cloud that fails is asked again at once."""
    monkeypatch.setattr(failures, "_BACKOFF_S", (0.02, 0.04))


@pytest.fixture
def bench(cloud: FakeCloud, tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def make(gates: ScriptedGates | None = None, *, has_local: bool = True, **settings: Any) -> Any:
        config = RouterConfig(
            **{
                "cloud_url": cloud.url,
                "cloud_model": "pocket-large",
                "ledger": tmp_path / "ledger.sqlite3",
                "cloud_timeout_s": 5.0,
                "cloud_continues": True,
                "prices": Prices(cloud_input=0.5, cloud_output=1.5),
            }
            | settings
        )
        local = ScriptedLocal()
        router = Router(config, tiers(local if has_local else None, config, gates))
        try:
            await router.start()
            yield Bench(router, local, tmp_path / "ledger.sqlite3")
        finally:
            await router.close()
            assert local.running == 0, "a local run was left behind"

    return make
