"""Constraints compiled beside the step loop: each once, counted as waiting, given up by an abort, holding up nobody."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from queue import SimpleQueue

import pytest
from threaded_engine import ThreadedEngine
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.process.grammar_compilation import GrammarJobs
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.worker.served_model import ServedModel
from updraft.protocol.errors import EngineError, InvalidRequestError, OverloadedError
from updraft.protocol.sampling import SamplingParams
from updraft.protocol.structured import Constraint
from updraft.text.grammars.compiler import GrammarCompiler
from updraft.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[4]
POCKET = ROOT / "embedded" / "weights" / "pocket-large"


def constrained(name: str, pattern: str = "[ab]{3}") -> GenerationRequest:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    return GenerationRequest(name, [1, 2], params, constraint=Constraint("regex", pattern, "guided_regex"))


def plain(name: str) -> GenerationRequest:
    return GenerationRequest(name, [1, 2], SamplingParams(temperature=0.0, max_tokens=4))


async def answer(engine: ThreadedEngine, request: GenerationRequest) -> list[int]:
    return [token async for output in engine.generate(request) for token in output.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the engine's counters are no events
            await asyncio.sleep(0.002)


def serve(engine: Engine, scenario: Callable[[ThreadedEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        served = ThreadedEngine(engine)
        await served.start()
        try:
            await asyncio.wait_for(scenario(served), 60)
        finally:
            await asyncio.wait_for(served.close(), 5)

    asyncio.run(main())


class Compiler:
    """Stands for `Engine.prepare`: takes until it is let go, and notes what it was asked for."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, request: GenerationRequest) -> None:
        self.compiled.append(request.request_id)
        self.begun.set()
        assert self.go.wait(60)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(Engine, "prepare", lambda _, request: request.constraint and compiler(request))
    return compiler


def test_requests_being_prepared_wait_in_the_queue(make_engine, compiler):
    async def scenario(engine: ThreadedEngine) -> None:
        tasks = [asyncio.create_task(answer(engine, constrained(str(number)))) for number in range(2)]
        await until(lambda: engine.stats().waiting == 2)
        for late in (constrained("late"), plain("late")):
            with pytest.raises(OverloadedError):
                await answer(engine, late)
        with pytest.raises(InvalidRequestError, match="prompt has no tokens"):  # told before it is prepared
            await answer(engine, GenerationRequest("empty", [], constraint=constrained("").constraint))
        tasks[1].cancel()
        await until(lambda: engine.stats().waiting == 1)
        assert len(await answer(engine, plain("next"))) == 4
        compiler.go.set()
        assert len(await tasks[0]) == 4
        assert engine.stats().waiting == 0

    serve(make_engine(max_waiting=1, max_num_seqs=1), scenario)


def test_abort_cancels_a_pending_compilation(make_engine, compiler):
    async def scenario(engine: ThreadedEngine) -> None:
        tasks = [asyncio.create_task(answer(engine, constrained(name))) for name in ("begun", "queued", "kept")]
        await until(lambda: compiler.compiled == ["begun"] and engine.stats().waiting == 3)
        for task in tasks[:2]:
            task.cancel()
        await until(lambda: engine.stats().waiting == 1)
        compiler.go.set()
        assert len(await tasks[2]) == 4
        assert set(compiler.compiled) == {"begun", "kept"}
        assert engine.stats().finished_requests == 1

    serve(make_engine(), scenario)


def test_an_engine_closes_and_resets_whatever_is_being_prepared(make_engine, compiler):
    async def scenario(engine: ThreadedEngine) -> None:
        asyncio.create_task(answer(engine, constrained("begun"))).add_done_callback(lambda task: task.exception())
        await until(lambda: engine.stats().waiting == 1)
        assert engine.engine.reset() == []
        assert engine.engine.stats().waiting == 1

    serve(make_engine(), scenario)
    compiler.go.set()


def test_waiting_counts_from_the_arrival(make_engine, compiler):
    """A request with a constraint has its place by when it came, not by when that was compiled."""
    engine = make_engine()
    first, second = constrained("first"), plain("second")
    engine.expect(first)
    engine.add_request(second)
    compiler.go.set()
    engine.add_request(first, engine.prepare(first))
    assert [state.request_id for state in engine._scheduler.waiting] == ["first", "second"]
    engine.expect(constrained("third"))
    engine.abort("third")
    assert engine.stats().aborted_requests == 1


def test_a_thread_that_died_is_replaced_and_places_are_given_back(make_engine, monkeypatch):
    def dying(self: GrammarJobs) -> None:
        self._queue.get()

    with monkeypatch.context() as broken:
        broken.setattr(GrammarJobs, "_work", dying)
        preparations = GrammarJobs(lambda _: None, lambda _: None)
        preparations.begin(plain("lost"))
        assert preparations._thread is not None
        preparations._thread.join(60)
    done = SimpleQueue()
    preparations._done = done.put
    preparations.begin(plain("next"))
    assert done.get(timeout=10) == "next"
    preparations.close()

    async def scenario(engine: ThreadedEngine) -> None:
        for name in ("a", "b", "c"):
            with pytest.raises(EngineError, match="no threads left"):
                await answer(engine, constrained(name))
        assert len(await answer(engine, plain("plain"))) == 4

    def no_thread(_preparations: GrammarJobs, _request: GenerationRequest) -> None:
        raise RuntimeError("no threads left")

    monkeypatch.setattr(GrammarJobs, "begin", no_thread)
    serve(make_engine(max_waiting=2), scenario)


def test_a_bug_in_preparing_costs_that_request_alone(make_engine, monkeypatch):
    def broken(_engine: Engine, request: GenerationRequest) -> None:
        if request.constraint is not None:
            raise ValueError("a bug")

    monkeypatch.setattr(Engine, "prepare", broken)

    async def scenario(engine: ThreadedEngine) -> None:
        with pytest.raises(EngineError, match="ValueError: a bug"):
            await answer(engine, constrained("poison"))
        await until(lambda: engine.stats().waiting == 0)
        assert len(await answer(engine, plain("good"))) == 4

    serve(make_engine(max_waiting=1), scenario)


def test_good_or_bad_a_constraint_is_compiled_once(make_llama, monkeypatch):
    tokenizer = Tokenizer.from_folder(POCKET)
    model = make_llama(0, vocab_size=tokenizer.vocab_size)
    engine = Engine(ServedModel(model, tokenizer=tokenizer, eos_ids=tokenizer.eos_ids), EngineConfig())
    compiled: list[str] = []
    compile_ = GrammarCompiler.compile

    def counted(self: GrammarCompiler, constraint: Constraint):
        compiled.append(threading.current_thread().name)
        return compile_(self, constraint)

    monkeypatch.setattr(GrammarCompiler, "compile", counted)

    async def scenario(served: ThreadedEngine) -> None:
        assert set(tokenizer.decode(await answer(served, constrained("good")))) <= set("ab")
        with pytest.raises(InvalidRequestError, match="guided_regex"):
            await answer(served, constrained("bad", "("))
        assert compiled == ["updraft-grammar"] * 2
        await until(lambda: served.stats().waiting == 0)

    serve(engine, scenario)


def test_an_id_given_away_again_is_another_preparation() -> None:
    compiler, done = Compiler(), SimpleQueue[str]()
    preparations = GrammarJobs(compiler, done.put)
    preparations.begin(constrained("same", "first"))
    assert compiler.begun.wait(60)
    preparations.cancel("same")
    preparations.begin(constrained("same", "second"))
    assert preparations.take("same") is None
    compiler.go.set()
    assert [done.get(timeout=5) for _ in range(2)] == ["same", "same"]
    taken = preparations.take("same")
    assert taken is not None
    assert taken.request.constraint == constrained("same", "second").constraint
    assert preparations.take("same") is None
    preparations.close()


def test_a_process_ends_while_a_constraint_is_compiled() -> None:
    code = """
import threading
from updraft.cloud_engine.engine.process.grammar_compilation import GrammarJobs
from updraft.cloud_engine.engine.types.request import GenerationRequest
begun = threading.Event()
preparations = GrammarJobs(lambda request: (begun.set(), threading.Event().wait(300)), print)
preparations.begin(GenerationRequest("r", [1]))
begun.wait()
preparations.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / ".typing")}, timeout=60)
