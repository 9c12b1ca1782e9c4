"""A local model that cannot be used leaves the cloud alone, says why, and comes back once it can."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cascade_bench import Bench, run
from router_fakes import FakeCloud, ScriptedLocal, SlowEngine
from updraft.embedded.pocket import pocket_small_gguf
from updraft.protocol.errors import MissingDependencyError, ModelLoadError, UpdraftError
from updraft.protocol.http.wire import WireRequest
from updraft.protocol.sampling import SamplingParams
from updraft.router import factory
from updraft.router.config import RouterConfig
from updraft.router.privacy.rules import Privacy
from updraft.router.router import Router
from updraft.router.tiers import local
from updraft.router.tiers.local import EngineLocalTier, LoadBackoff

Trouble = Callable[[Path, pytest.MonkeyPatch], None]


def is_absent(file: Path, _: pytest.MonkeyPatch) -> None:
    assert not file.exists()


def is_cut_off(file: Path, _: pytest.MonkeyPatch) -> None:
    file.write_bytes(pocket_small_gguf().read_bytes()[:70_000])


def does_not_fit(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(pocket_small_gguf(), file)
    monkeypatch.setattr("updraft.local_engine.opening.free_memory", lambda _machine: 1000)


def has_no_engine(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> None:
        raise MissingDependencyError("llama-cpp-python is not installed. Build it.")

    shutil.copy(pocket_small_gguf(), file)
    monkeypatch.setattr("updraft.local_engine.opening.ensure_usable_build", fails)


TROUBLES: list[tuple[Trouble, int, str]] = [
    (is_absent, 500, "model_load_failed"),
    (is_cut_off, 500, "model_load_failed"),
    (does_not_fit, 507, "model_too_large"),
    (has_no_engine, 500, "missing_dependency"),
]


def bench_of(cloud: FakeCloud, tmp_path: Path, local: str, **settings: Any) -> Bench:
    ledger = tmp_path / "ledger.sqlite3"
    config = RouterConfig(local=local, cloud_url=cloud.url, cloud_model="big", ledger=ledger, **settings)
    return Bench(Router(config), ScriptedLocal(), ledger)


async def health(bench: Bench) -> dict[str, str]:
    answer = await bench.handle(WireRequest("GET", "/health", {}, b""))
    assert isinstance(answer.body, bytes)
    return json.loads(answer.body)


@pytest.mark.parametrize(("trouble", "status", "code"), TROUBLES, ids=[each[0].__name__ for each in TROUBLES])
def test_the_cloud_answers_alone(
    trouble: Trouble, status: int, code: str, cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.gguf"
    trouble(file, monkeypatch)

    async def test() -> None:
        b = bench_of(cloud, tmp_path, str(file), privacy=Privacy(patterns={"code name": "bluebird"}))
        await b.router.start()
        for model in ("cloud", "big"):
            assert (await b.answer(model))["updraft"]["route"] == "cloud"
        routed = (await b.answer("auto"))["updraft"]
        assert routed["route"] == "cloud"
        assert routed["reason"].startswith("no model on the device: ")
        for model in ("local", "mine"):
            refused = await b.ask(model)
            assert (refused.status, refused.headers["x-should-retry"]) == (status, "false")
            assert (await b.answer(model))["error"]["code"] == code
        private = (await b.answer("auto", messages=[{"role": "user", "content": "bluebird"}]))["error"]
        assert private["code"] == "private"
        assert await health(b) == {"status": "ok", "local": "unavailable", "code": code}
        assert len(cloud.requests) == 3
        await b.router.close()
        alone = Router(RouterConfig(local=str(file), cloud_url=cloud.url, cloud_model="big", offline=True))
        with pytest.raises(UpdraftError) as caught:
            await alone.start()
        assert caught.value.code == code
        await alone.close()

    run(test())


def test_failed_model_is_retried_when_its_file_changes(
    cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, open_local, file = [], factory.open_local, tmp_path / "mine.gguf"
    is_cut_off(file, monkeypatch)
    monkeypatch.setattr(factory, "open_local", lambda config: (tries.append(1), open_local(config))[1])

    async def test() -> None:
        b = bench_of(cloud, tmp_path, str(file), confidence=0.01)
        for model in ("auto", "cloud", "local") * 3:
            await b.ask(model)
        assert len(tries) == 1
        shutil.copy(pocket_small_gguf(), file)
        assert (await b.answer("local"))["updraft"]["route"] == "local"
        assert (await b.answer("auto"))["updraft"]["reason"].startswith("uncalibrated")
        assert await health(b) == {"status": "ok"}
        assert len(tries) == 2
        await b.router.close()

    run(test())


def test_failed_model_is_retried_with_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(local.time, "monotonic", lambda: now)
    backoff, lengths = LoadBackoff(), []
    assert backoff.error is None
    for _ in range(8):
        backoff.begin(error := ModelLoadError("no memory"))
        began = now
        while backoff.error is error:
            now += 5.0
        lengths.append(now - began)
    assert lengths == [15, 30, 60, 120, 240, 480, 900, 900]


def test_a_model_that_does_not_come_back_from_sleep_is_left_alone_for_a_while() -> None:
    tries, versions = [], ["broken"]

    def load() -> SlowEngine:
        tries.append(1)
        if versions[-1] == "broken":
            raise ModelLoadError("The file is cut off.")
        return SlowEngine()

    async def test() -> None:
        tier = EngineLocalTier(SlowEngine(), load, None, LoadBackoff(lambda: versions[-1]))
        await tier.sleep()
        for _ in range(3):
            with pytest.raises(ModelLoadError, match="cut off"):
                await tier.start([], SamplingParams())
        assert len(tries) == 1
        versions.append("whole")
        await (await tier.start([], SamplingParams())).aclose()
        await tier.aclose()

    run(test())


def test_a_local_server_that_hangs_keeps_nobody_else_waiting(
    cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "_SERVER_START_S", 0.1)

    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as hung:
            b = bench_of(cloud, tmp_path, f"http://127.0.0.1:{hung.getsockname()[1]}")
            async with asyncio.timeout(50):
                assert (await b.answer("cloud"))["updraft"]["route"] == "cloud"
                assert "did not answer" in (await b.answer("local"))["error"]["message"]
            await b.router.close()

    run(test())
