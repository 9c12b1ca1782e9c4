"""Admission by predicted growth: few preemptions, at no cost in tokens per second, on a simulated clock."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.kv.kv_cache_manager import KVCacheManager
from updraft.cloud_engine.engine.scheduling import scheduler as scheduling
from updraft.cloud_engine.engine.scheduling.growth import AnswerLengths, GrowthForecast
from updraft.cloud_engine.engine.scheduling.scheduler import Scheduler
from updraft.cloud_engine.engine.speculation.speculator import Speculator
from updraft.cloud_engine.engine.types.prediction import PredictionCursor
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.types.request_state import RequestState
from updraft.protocol.sampling import ResolvedParams

BLOCK, RUNNING = 16, 32
PROMPTS, ANSWERS = (30, 100, 200), (25, 100, 200, 400, 750)
CONFIG = EngineConfig(block_size=BLOCK, max_num_seqs=RUNNING, max_num_batched_tokens=512, max_waiting=1000)
#: Number of rows that take as long as the fixed part of a step: on 16 cores, and on a GPU.
CPU, GPU = 10, 300


def state_of(name: str, prompt: list[int], max_tokens: int, arrived: float = 0.0) -> RequestState:
    greedy, cursor = ResolvedParams(temperature=0.0), PredictionCursor([])
    return RequestState(
        GenerationRequest(name, prompt), max_tokens, greedy, 0, frozenset(), list(prompt), cursor, arrived=arrived
    )


@dataclass
class Run:
    """The result of serving the same requests: rows computed over rows needed, and tokens per second."""

    rows: float
    tokens_per_s: float
    peak_blocks: int


def serve(num_blocks: int, *, are_limited: bool, caching: bool, fixed_rows: float = CPU) -> Run:
    """Serve requests with random answers. If `are_limited`, `max_tokens` ends each answer, and otherwise the model.

    A row takes one second."""
    rng, made_up = random.Random(1), random.Random(2)
    cache = KVCacheManager(num_blocks, BLOCK, enable_prefix_caching=caching)
    scheduler = Scheduler(CONFIG, cache, Speculator([], CONFIG), fixed_rows=fixed_rows)
    lengths: dict[str, int] = {}
    needed = rows = peak = 0
    for number in range(256):
        prompt = [rng.randrange(1000) for _ in range(rng.choice(PROMPTS))]
        name, length = str(number), rng.choice(ANSWERS)
        lengths[name], needed = length, needed + len(prompt) + length - 1
        scheduler.add(state_of(name, prompt, length if are_limited else 1000, number / 1e6))
    seconds = 0.0
    while batch := scheduler.schedule():
        computed = sum(item.num_tokens for item in batch)
        caught_up = [item.state for item in batch if item.is_caught_up]
        scheduler.plan(batch)
        rows += computed
        seconds += fixed_rows + computed
        peak = max(peak, cache.pool.num_used)
        for item in batch:
            cache.register(item.state)
        for state in caught_up:
            state.token_ids.append(made_up.randrange(1000))
            if state.num_generated_tokens == lengths[state.request_id]:
                scheduler.remove(state)
    return Run(rows / needed, sum(lengths.values()) / seconds, peak)


@pytest.fixture(scope="module")
def num_blocks() -> int:
    """A third of the blocks that the requests need."""
    return serve(10_000, are_limited=True, caching=False).peak_blocks // 3


@pytest.mark.parametrize("caching", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("are_limited", [False, True], ids=["own ends", "max_tokens"])
@pytest.mark.parametrize("fixed_rows", [CPU, GPU], ids=["CPU", "GPU"])
def test_a_small_pool_recomputes_little(
    num_blocks: int, are_limited: bool, caching: bool, fixed_rows: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows cost little beside a step, some more are computed again, so that more requests share the steps."""
    foresighted = serve(num_blocks, are_limited=are_limited, caching=caching, fixed_rows=fixed_rows)
    assert foresighted.rows <= (1.1 if fixed_rows == CPU else 1.5)
    monkeypatch.setattr(scheduling.GrowthForecast, "peak_with", lambda *_: 0)
    eager = serve(num_blocks, are_limited=are_limited, caching=caching, fixed_rows=fixed_rows)
    assert foresighted.tokens_per_s >= eager.tokens_per_s


def test_forecasts_follow_the_lengths_of_answers() -> None:
    """Answers of 100 tokens are expected after many of them, and no growth beyond `max_tokens`."""
    lengths = AnswerLengths()
    for number in range(200):
        state = state_of(str(number), [0], 1000)
        state.token_ids += [0] * 100
        lengths.add(state)
    running = [state_of(f"running {number}", [0] * 10, 1000) for number in range(20)]
    peak = GrowthForecast(lengths, running[1:], 1).peak_with(running[0])
    assert 20 * 80 < peak < 20 * 110
    for state in running:
        state.max_tokens = 10
    assert GrowthForecast(lengths, running[1:], 1).peak_with(running[0]) <= 20 * 10


def test_answers_at_their_limit_say_nothing_about_shorter_ones() -> None:
    lengths = AnswerLengths()
    for number in range(200):
        state = state_of(str(number), [0], 100)
        state.token_ids += [0] * 100
        lengths.add(state)
    running = [state_of(f"running {number}", [0] * 10, 400) for number in range(20)]
    assert GrowthForecast(lengths, running[1:], 1).peak_with(running[0]) > 20 * 120


def test_an_answer_that_grows_alone_needs_no_reserve() -> None:
    """A request that fits alone is never kept waiting for its own growth."""
    cache = KVCacheManager(8, BLOCK)
    scheduler = Scheduler(CONFIG, cache, Speculator([], CONFIG))
    scheduler.add(state_of("alone", [0] * 20, 100))
    assert [item.state.request_id for item in scheduler.schedule()] == ["alone"]
