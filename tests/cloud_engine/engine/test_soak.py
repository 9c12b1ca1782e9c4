"""Random load on one engine, with random aborts and too few blocks: nothing leaks, nothing is stuck, memory is flat."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.protocol.errors import ContextLengthError, InvalidRequestError, OverloadedError
from updraft.protocol.sampling import SamplingParams

VOCABULARY = 97
MAX_STEPS = 3000  # that any request may take, however busy the engine is
MAX_GROWTH = 48 * 2**20


class Load:
    """Asks at random, leaves at random, and remembers who is still waited for."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.prefixes = [[self.random.randrange(VOCABULARY) for _ in range(64)] for _ in range(6)]
        self.open: dict[str, tuple[int, int]] = {}  # id -> (answers to come, step it was asked in)
        self.steps = self.requested = self.finished = self.aborted = self.refused = 0

    def step(self) -> None:
        self.steps += 1
        while len(self.open) < 40 and self.random.random() < 0.4:
            self.ask()
        if self.open and self.random.random() < 0.1:
            self.leave(self.random.choice(list(self.open)))
        for output in self.engine.step() if self.engine.has_work else []:
            answers, since = self.open[output.request_id]
            answers -= output.finish_reason is not None
            if answers:
                self.open[output.request_id] = answers, since
            else:
                del self.open[output.request_id]
                self.finished += 1
        assert all(self.steps - since < MAX_STEPS for _, since in self.open.values()), "a request is stuck"

    def has_seen_all(self) -> bool:
        stats = self.engine.stats()
        return bool(stats.preemptions and stats.prefix_hit_tokens and self.aborted and self.finished)

    def ask(self) -> None:
        self.requested += 1
        request = self.request(f"r{self.requested}")
        try:
            self.engine.add_request(request)
            self.open[request.request_id] = request.n, self.steps
        except (OverloadedError, ContextLengthError, InvalidRequestError):
            self.refused += 1

    def leave(self, request_id: str) -> None:
        self.engine.abort(request_id)
        del self.open[request_id]
        self.aborted += 1

    def request(self, name: str) -> GenerationRequest:
        draw = self.random
        shared = draw.choice(self.prefixes)[: draw.choice([0, 16, 40, 64])]
        prompt = shared + [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 60))]
        kind = draw.random()
        fields: dict[str, Any] = {"priority": draw.randint(-1, 1), "cache_salt": draw.choice(["", "a"])}
        if kind < 0.1:
            return GenerationRequest(name, prompt, embed=True, **fields)
        length = draw.randint(1, 60)
        params = SamplingParams(
            max_tokens=length,
            temperature=draw.choice([0.0, 0.7, 1.0]),
            top_p=draw.choice([1.0, 0.9]),
            seed=draw.choice([None, 3]),
            logprobs=draw.choice([None, None, 2]),
            prompt_logprobs=draw.choice([None, None, None, 1]),
            presence_penalty=draw.choice([0.0, 0.5]),
        )
        draft = [draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 0, 20]))]
        return GenerationRequest(name, prompt, params, draft, n=draw.choice([1, 1, 1, 3]), **fields)


def soak(engine: Engine, seconds: float, seed: int = 0) -> Load:
    load, process = Load(engine, seed), psutil.Process()
    end, settled = time.monotonic() + seconds, time.monotonic() + min(60.0, seconds / 3)
    before = None
    while time.monotonic() < end or not load.has_seen_all():
        load.step()
        if before is None and time.monotonic() > settled:
            gc.collect()
            before = process.memory_info().rss
    while engine.has_work:
        load.engine.step()
    gc.collect()
    assert before is not None
    assert process.memory_info().rss - before < MAX_GROWTH, "memory grows"
    stats = engine.stats()
    assert stats.kv_blocks_used == stats.running == stats.waiting == stats.kv_slots_wasted == 0
    return load


@pytest.fixture
def make_soaked(make_engine: Callable[..., Engine], draft: Any) -> Callable[[], Engine]:
    return lambda: make_engine(
        draft=draft,
        ngram=True,
        scheduling_policy="priority",
        num_gpu_blocks_override=40,
        max_num_seqs=12,
        max_num_batched_tokens=96,
        max_waiting=24,
        eos=[5],
    )


@pytest.mark.usefixtures("both_depths")
def test_a_short_soak(make_soaked: Callable[[], Engine]) -> None:
    soak(make_soaked(), 6.0)


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_half_an_hour_of_random_load(make_soaked: Callable[[], Engine]) -> None:
    load = soak(make_soaked(), 1800.0, seed=1)
    print(
        f"{load.steps:,} steps, {load.requested:,} asked, {load.finished:,} finished, {load.aborted:,} aborted, "
        f"{load.refused:,} refused; {load.engine.stats()}"
    )
