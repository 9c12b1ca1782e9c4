"""The engine in its own process, seen from its asyncio client: same answers, and no death goes unheard."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from tiny_model import write_model
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.process import core_process, engine_process, messages
from updraft.cloud_engine.engine.process.engine_process import EngineProcess
from updraft.cloud_engine.engine.process.messages import Load
from updraft.cloud_engine.engine.types.outputs import TokenOutput
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.protocol.errors import (
    ConfigurationError,
    ContextLengthError,
    EngineDownError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    OverloadedError,
    RequestFailedError,
)
from updraft.protocol.safety.system import python_command
from updraft.protocol.sampling import SamplingParams

CONFIG = EngineConfig(threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", 0)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither processes nor socket folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = children()
    yield
    assert children() <= others
    assert list(tmp_path.glob("updraft-core-*")) == []


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def serve(
    folder: Path, scenario: Callable[[EngineProcess, psutil.Process], Awaitable[None]], *, restart: bool = False
) -> None:
    others = children()

    async def main(engine: EngineProcess) -> None:
        await engine.start()
        (core,) = children() - others
        try:
            await asyncio.wait_for(scenario(engine, core), 120)
        finally:
            await engine.close()

    with EngineProcess(Load(str(folder), None, CONFIG), restart=restart) as engine:
        loaded: list[tuple[int, int]] = []
        ready = engine.wait_ready(lambda done, total: loaded.append((done, total)))
        assert loaded == sorted(loaded)
        assert loaded[-1][0] == loaded[-1][1] > 0
        assert (ready.model_id, ready.context_length) == ("tiny", 256)
        asyncio.run(main(engine))


def request(name: str, max_tokens: int = 200) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=2)
    return GenerationRequest(name, [ord(letter) % 100 for letter in name], params)


async def outputs(engine: EngineProcess, request: GenerationRequest) -> list[TokenOutput]:
    return [output async for output in engine.generate(request)]


async def until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - processes are no events
            await asyncio.sleep(0.005)


def same(ours: list[TokenOutput], theirs: list[TokenOutput]) -> bool:
    def key(all_outputs: list[TokenOutput]) -> list[object]:
        return [(output.token_ids, output.logprobs, output.finish_reason) for output in all_outputs]

    return key(ours) == key(theirs)


def test_answers_errors_and_the_hang_of_a_core(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One core for all of it: loading torch is what takes the time here."""
    monkeypatch.setattr(core_process, "HUNG_S", 1.5)
    plain = Engine.from_folder(folder, config=CONFIG)
    expected: list[TokenOutput] = []
    plain.add_request(request("hello", 30))
    while plain.has_work:
        expected += plain.step()

    async def scenario(engine: EngineProcess, core: psutil.Process) -> None:
        assert same(await outputs(engine, request("hello", 30)), expected)
        assert engine.stats().finished_requests == 1
        with pytest.raises(ContextLengthError, match="256 tokens"):
            await outputs(engine, request("long", 257))
        with pytest.raises(InvalidRequestError, match="cannot be encoded"):
            await outputs(engine, GenerationRequest("wide", [1], priority=2**70))
        with pytest.raises(InvalidRequestError) as caught:
            await outputs(engine, GenerationRequest("empty", []))
        assert (caught.value.param, caught.value.code) == ("prompt", "invalid_value")
        for number in (signal.SIGINT, signal.SIGTERM):
            core.send_signal(number)
        assert same(await outputs(engine, request("hello", 30)), expected)

        running = asyncio.create_task(outputs(engine, request("running")))
        await until(lambda: engine.stats().running == 1)
        core.suspend()
        with pytest.raises(EngineDownError, match="no heartbeat"):
            await running
        assert engine.failure is not None
        assert engine.stats().running == 0

    serve(folder, scenario)


def test_a_core_is_restarted_until_it_dies_too_often(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "RESTART_BACKOFF_S", (0.0, 0.1))
    copy = tmp_path / "tiny"
    shutil.copytree(folder, copy)

    async def scenario(engine: EngineProcess, core: psutil.Process) -> None:
        others = children() - {core}
        before = await outputs(engine, request("a", 20))
        core.kill()
        await until(lambda: engine.failure is not None)
        assert engine.failure is not None
        assert (engine.failure.status, engine.failure.code) == (503, "engine_restarting")
        await until(lambda: engine.failure is None)
        assert same(await outputs(engine, request("a", 20)), before)
        assert engine.stats().restarts == 1

        shutil.rmtree(copy)
        (restarted,) = children() - others
        restarted.kill()
        await until(lambda: engine.failure is not None and engine.failure.code == "engine_down")
        with pytest.raises(EngineDownError, match=f"{copy}.*restart this one"):
            await outputs(engine, request("a"))

    serve(copy, scenario, restart=True)


POISON = 99  # the core kills itself on a prompt with this token
POISONED_CORE = f"""
import os, sys
from pathlib import Path
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.process.core_main import main

healthy = Engine.step
def step(self):
    if any({POISON} in state.request.prompt_ids for state in self._scheduler.requests()):
        os.kill(os.getpid(), 9)
    return healthy(self)
Engine.step = step
main(Path(sys.argv[-1]))
"""


@pytest.mark.parametrize("num_innocents", [0, 7])
def test_only_the_request_that_kills_its_core_fails(
    num_innocents: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "RESTART_BACKOFF_S", (0.0, 0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(core_process, "python_command", lambda *words: python_command("-c", POISONED_CORE, words[-1]))
    names = [f"r{number}" for number in range(num_innocents)]

    def tokens(outputs: list[TokenOutput]) -> list[int]:
        return [token for output in outputs for token in output.token_ids]

    async def scenario(engine: EngineProcess, _core: psutil.Process) -> None:
        expected = [tokens(await outputs(engine, request(name))) for name in names]
        innocents = [asyncio.create_task(outputs(engine, request(name))) for name in names]
        await until(lambda: engine.stats().running == len(names))
        with pytest.raises(RequestFailedError, match=r"on this request alone .*SIGKILL") as caught:
            await outputs(engine, GenerationRequest("poison", [POISON]))
        assert caught.value.code == "request_failed"
        assert [tokens(task) for task in await asyncio.gather(*innocents)] == expected
        await until(lambda: engine.failure is None)
        assert engine.stats().restarts <= 5
        assert len(tokens(await outputs(engine, request("next")))) == 200

    serve(folder, scenario, restart=True)


def test_a_core_that_dies_while_loading_says_so(folder: Path) -> None:
    others = children()
    with EngineProcess(Load(str(folder), None, CONFIG)) as engine:
        (core,) = children() - others
        core.kill()
        started = time.monotonic()
        with pytest.raises(EngineError, match="SIGKILL"):
            engine.wait_ready()
        assert time.monotonic() - started < core_process.HUNG_S / 2


def test_last_output_of_a_dead_core_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'first light' >&2\necho 'what(): out of paper'\nexit 3\n")
    program.chmod(0o700)
    monkeypatch.setattr(core_process.sys, "executable", str(program))
    with (
        EngineProcess(Load("anything", None, CONFIG)) as engine,
        pytest.raises(EngineError, match=r"exited with code 3; last output: first light / what\(\): out of paper$"),
    ):
        engine.wait_ready()


def test_load_errors_keep_their_type(tmp_path: Path) -> None:
    with (
        EngineProcess(Load(str(tmp_path), None, CONFIG)) as engine,
        pytest.raises(ModelLoadError, match=r"config\.json"),
    ):
        engine.wait_ready()
    with (
        EngineProcess(Load(str(tmp_path), None, EngineConfig(device="tpu"))) as engine,
        pytest.raises(ConfigurationError, match="cpu, cuda or cuda:NUMBER") as caught,
    ):
        engine.wait_ready()
    assert caught.value.param == "device"


def test_a_core_that_talks_nonsense_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(engine: EngineProcess, core: psutil.Process) -> None:
        running = asyncio.create_task(outputs(engine, request("running")))
        await until(lambda: engine.stats().running == 1)
        monkeypatch.setattr(core_process, "decode_report", lambda data: messages.decode_report(data[1:]))
        with pytest.raises(EngineDownError, match="Error: "):
            await running
        await until(lambda: not core.is_running())

    serve(folder, scenario)


def test_closing_ends_requests_in_flight(folder: Path) -> None:
    async def scenario(engine: EngineProcess, core: psutil.Process) -> None:
        running = asyncio.create_task(outputs(engine, request("running")))
        await until(lambda: engine.stats().running == 1)
        await engine.close()
        with pytest.raises(OverloadedError, match="shutting down"):
            await running
        assert not core.is_running()

    serve(folder, scenario)
