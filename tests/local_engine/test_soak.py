"""Eight threads hammer the engine with random starts, cancels and timeouts: nothing crashes, leaks or crosses over."""

import asyncio
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest
from updraft.embedded import pocket
from updraft.local_engine.engine import LocalEngine, LocalOptions
from updraft.local_engine.llama.library import llama
from updraft.local_engine.runtime import context_layout as layout
from updraft.protocol.errors import OverloadedError
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingParams
from waiting import wait_for

THREADS = 8
MAX_GROWTH = 48 * 2**20
FATES = ("whole", "dropped", "cancelled", "timed out")
GREEDY = SamplingParams(temperature=0, max_tokens=60)
QUESTIONS = [
    [Message("user", text * (1 + i % 3))]
    for i in range(30)
    for text in (f"What is {3 * i} + {i * i % 47}?", f"Reverse the letters of {'stonewall'[i % 6 :]}. ")
]


class Hammer:
    """One thread's work until all is `done`: ask, read all or some of it, check; leave at random."""

    def __init__(self, engine: LocalEngine, solo: list[list[int]], done: Callable[[], bool], seed: int) -> None:
        self.engine, self.solo, self.done = engine, solo, done
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.work)

    def work(self) -> None:
        try:
            while not self.done():
                self.one()
        except BaseException as error:  # noqa: BLE001 - raised by the test
            self.error = error

    def one(self) -> None:
        draw, place = self.random, self.random.randrange(len(QUESTIONS))
        try:
            run = self.engine.start(QUESTIONS[place], GREEDY)
        except OverloadedError:
            self.counts["refused"] += 1
            time.sleep(0.01)
            return
        kind = draw.random()
        if kind < 0.1:
            del run  # never read
            self.counts["dropped"] += 1
        elif kind < 0.25:
            threading.Timer(draw.random() * 0.02, run.cancel).start()
            ids = [token.id for token in run]
            assert ids[: len(self.solo[place])] == self.solo[place][: len(ids)]
            self.counts["cancelled"] += 1
        elif kind < 0.4:
            asyncio.run(self.with_patience(run, draw.random() * 0.02))
        elif kind < 0.45:
            self.sample(place)
            assert [token.id for token in run] == self.solo[place]
        else:
            list(run)
            assert run.token_ids == self.solo[place]
            self.counts["whole"] += 1

    def sample(self, place: int) -> None:
        """Ask again while the first answer is under way: that may be one too many."""
        try:
            list(self.engine.start(QUESTIONS[place], SamplingParams(temperature=1.5, max_tokens=20, top_p=0.9)))
        except OverloadedError:
            self.counts["refused beside another"] += 1

    async def with_patience(self, run, seconds: float) -> None:
        async def read() -> None:
            async for _ in run:
                pass

        try:
            await asyncio.wait_for(read(), seconds)
        except TimeoutError:
            run.close()
            self.counts["timed out"] += 1


#: Sequences that share cells, and KV cache types. "f16" with flash attention is the default of larger models.
SHARED = LocalOptions(max_waiting=6, prompt_logprobs=False, kv_cache_type="f32")
KINDS = {
    "apart": LocalOptions(max_waiting=6),
    "shared prefixes": SHARED,
    "too few cells": replace(SHARED, max_model_len=256),
    "half precision": replace(SHARED, kv_cache_type="f16", flash_attention=False),
    "flash attention": replace(SHARED, kv_cache_type="f16"),
}


def soak(seconds: float, kind: str) -> Counter[str]:
    """At least so long, and until every fate of a request has been seen."""
    process, is_short_of_cells = psutil.Process(), kind == "too few cells"
    with LocalEngine.load(pocket.pocket_small_gguf(), KINDS[kind]) as engine:
        solo: list[list[int]] = []
        for question in QUESTIONS:
            run = engine.start(question, GREEDY)
            list(run)
            solo.append(run.token_ids)
        end, loop = time.monotonic() + seconds, engine._resources.loop

        def done() -> bool:
            seen = all(any(hammer.counts[fate] for hammer in hammers) for fate in FATES)
            return time.monotonic() > end and seen and loop._scheduler.preemptions >= is_short_of_cells

        hammers = [Hammer(engine, solo, done, seed) for seed in range(THREADS + 2)]
        for hammer in hammers:
            hammer.thread.start()
        time.sleep(min(60.0, seconds / 3))
        gc.collect()
        before = process.memory_info().rss
        for hammer in hammers:
            hammer.thread.join(seconds + 200)
            assert not hammer.thread.is_alive(), "stuck"
            if hammer.error is not None:
                raise hammer.error
        gc.collect()
        assert process.memory_info().rss - before < MAX_GROWTH, "memory grows"
        wait_for(lambda: not loop._open)
        assert not loop._scheduler.has_work
        cache = loop._scheduler._cache
        assert cache._branches.keys() == cache._parked.keys()
        assert (loop._scheduler.preemptions > 0) == is_short_of_cells
    return sum((hammer.counts for hammer in hammers), Counter())


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch) -> str:
    if request.param == "flash attention" and not llama().kernels.attention:
        pytest.skip("llama.cpp's own attention depends on its company (decision 051)")
    if request.param == "too few cells":
        monkeypatch.setattr(layout, "DEFAULT_CELLS", 256)
    return request.param


def test_a_quarter_of_a_minute_of_it(kind) -> None:
    soak(15.0 / len(KINDS), kind)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_ten_minutes_of_it(kind) -> None:
    print(soak(600.0 / len(KINDS), kind))
