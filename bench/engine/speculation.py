"""Gains and costs of speculative decoding: the pocket pair under load, and simulated drafts for a large model."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ...cloud_engine.engine.config import EngineConfig
from ...cloud_engine.engine.engine import Engine
from ...cloud_engine.engine.kv.sizing import KVCacheSize
from ...cloud_engine.engine.speculation.draft_model import DraftModel
from ...cloud_engine.engine.types.request import GenerationRequest
from ...cloud_engine.engine.types.request_state import RequestState
from ...cloud_engine.models.decoder import Decoder
from ...embedded import pocket
from ...embedded.tasks import make_tasks
from ...protocol.requests import Message
from ...protocol.sampling import SamplingParams
from .driving import make_engine
from .shapes import random_model, shape_config

if TYPE_CHECKING:
    from ...cloud_engine.engine.worker.slots import RowsOf, SlotState

LOADS = (1, 4, 16, 64)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
_ORACLE_SHAPE = "qwen2.5-0.5b"
_BLOCK_S, _BLOCKS = 0.3, 28
_PROMPT, _OUTPUT = 32, 64
_LOAD = 64
_TASK_PARAMS = SamplingParams(temperature=0.0, max_tokens=128)
_CELLS = 128  # KV cache slots per request: prompt, answer and drafts, rounded up to whole blocks


def pocket_figures(loads: Sequence[int]) -> dict[str, float]:
    """Measure the pocket pair on its tasks with and without the draft model, with each number of requests in `loads`.

    Both engines alternate in short blocks, and the median of their ratios counts, so that other load on the machine
    cancels out. `spec_on_over_off_*`: tokens per second with the draft over those without. `spec_step_share`: share of
    steps that verified drafts. The first block of each engine is a warm-up and is not counted.
    """
    figures: dict[str, float] = {}
    stats: list[tuple[int, int, int, int]] = []
    for load in loads:
        plain, drafting = (_Stream(_pocket_engine(load, with_draft=with_draft), load) for with_draft in (False, True))
        ratios, speeds = _alternate(plain, drafting)
        figures[f"spec_on_over_off_{load}"] = statistics.median(ratios)
        figures[f"spec_on_tokens_per_s_{load}"] = speeds
        counters = drafting.engine.stats()
        stats.append((counters.speculative_steps, counters.steps, counters.draft_accepted, counters.draft_proposed))
        figures[f"spec_step_share_{load}"] = counters.speculative_steps / counters.steps
    steps, all_steps, accepted, proposed = (sum(column) for column in zip(*stats, strict=True))
    return {
        **figures,
        "spec_on_over_off_min": min(figures[f"spec_on_over_off_{load}"] for load in loads),
        "spec_step_share": steps / all_steps,
        "spec_acceptance": accepted / max(1, proposed),
    }


def oracle_target(like: Decoder) -> Decoder:
    """Create a model with random weights in the shape of a real model. It takes 1 GB in the dtype of `like`."""
    weight = like.embed_tokens.weight
    return random_model(shape_config(_ORACLE_SHAPE), weight.dtype, weight.device)


def draft_of(target: Decoder, shape: str) -> Decoder:
    """Create a draft model of `shape` with random weights, and with the target's vocabulary and context."""
    like, weight = target.config, target.embed_tokens.weight
    config = replace(shape_config(shape), vocab_size=like.vocab_size, context_length=like.context_length)
    return random_model(config, weight.dtype, weight.device)


def oracle_figures(target: Decoder, draft: Decoder, acceptances: Sequence[float]) -> dict[str, float]:
    """Return the speed with simulated drafts over the speed without drafts, by acceptance rate, for single requests."""
    return {f"spec_oracle{round(10 * rate):02d}_speedup": _oracle_speedup(target, draft, rate) for rate in acceptances}


def oracle_under_load(target: Decoder, draft: Decoder) -> dict[str, float]:
    """Return `spec_oracle08_speedup_64`: the speedup with 64 requests at a time, where drafts can hardly pay off."""
    return {f"spec_oracle08_speedup_{_LOAD}": _oracle_speedup(target, draft, 0.8, _LOAD)}


@contextmanager
def uniform_logits(target: Decoder) -> Generator[None]:
    """Make all logits zero within the `with` block, so that every greedy answer repeats token 0.

    With random weights, the best logits are so close that rounding would change answers from batch to batch. A logit
    bias is no alternative, because with logit edits the draft model takes a slower path.
    """
    weight = target.norm.weight
    original = weight.clone()
    weight.zero_()
    try:
        yield
    finally:
        weight.copy_(original)


def _oracle_speedup(target: Decoder, draft: Decoder, acceptance: float, load: int = 1) -> float:
    config = EngineConfig(max_num_seqs=load, enable_prefix_caching=False, max_waiting=load)
    config = replace(config, num_gpu_blocks_override=load * _CELLS // config.block_size + 1)
    vocabulary = target.config.vocab_size
    prompts = [[(token + number) % vocabulary for token in range(1, _PROMPT + 1)] for number in range(load)]
    with uniform_logits(target):
        plain = make_engine(target, config)
        answer = _timed(plain, prompts)[0]
        oracle = OracleDrafter(target, draft, plain.config, answer, acceptance)
        engine = make_engine(target, config, drafters=[oracle])
        oracle.runner.tables = engine._worker.slots.tables
        oracle.runner.restore()  # captures CUDA graphs that read these tables
        _timed(engine, prompts)  # warm-up, in which the engine adapts its draft lengths
        speedup = statistics.mean(_timed(plain, prompts)[1] / _timed(engine, prompts)[1] for _ in range(2))
    assert engine.stats().preemptions == 0, "preemptions would lower the measured load"
    return speedup


class OracleDrafter(DraftModel):
    """A drafter that knows the answer, and proposes each of its tokens correctly with probability `acceptance`.

    The draft model runs, so that the measured time includes drafting, but its proposals are replaced.
    """

    def __init__(
        self, target: Decoder, draft: Decoder, config: EngineConfig, answer: Sequence[int], acceptance: float
    ) -> None:
        super().__init__(draft, target.config, KVCacheSize.of([target], config), config)
        self._answer = list(answer)
        self._acceptance = acceptance
        self._random = random.Random(0)

    def offer(self, state: RequestState, limit: int) -> int:
        return min(limit, len(self._answer) - state.num_generated_tokens)

    def propose(self, batch: Sequence[SlotState], rows_of: RowsOf) -> None:
        super().propose(batch, rows_of)
        for item in batch:
            if item.drafter == self.name:
                start = item.num_generated_tokens
                right = self._answer[start : start + len(item.draft_ids)]
                item.draft_ids = [self._corrupted(token) for token in right]

    def _corrupted(self, token: int) -> int:
        return token if self._random.random() < self._acceptance else (token + 1) % self._rows


class _Stream:
    """An engine that always has `load` requests in flight. All engines get the same pocket tasks in the same order."""

    def __init__(self, engine: Engine, load: int) -> None:
        self.engine = engine
        self._load = load
        messages = ([Message(role="user", content=task.prompt)] for task in make_tasks("test", 400))
        self._prompts = enumerate(itertools.cycle(map(engine.tokenizer.encode_chat, messages)))
        self._in_flight = 0

    def run(self, seconds: float) -> float:
        """Return tokens per second over about `seconds`; unfinished requests continue in the next run."""
        tokens, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            for number, prompt in itertools.islice(self._prompts, self._load - self._in_flight):
                self.engine.add_request(GenerationRequest(str(number), prompt, _TASK_PARAMS))
            self._in_flight = self._load
            for output in self.engine.step():
                tokens += len(output.token_ids)
                self._in_flight -= output.finish_reason is not None
        return tokens / (time.perf_counter() - started)


def _alternate(plain: _Stream, drafting: _Stream) -> tuple[list[float], float]:
    """Run both engines in turns. Return speed ratios of `drafting` to `plain`, and the median speed of `drafting`."""
    plain.run(_BLOCK_S)
    drafting.run(2 * _BLOCK_S)
    pairs: list[tuple[float, float]] = []
    for block in range(_BLOCKS):
        first, second = (plain, drafting) if block % 2 else (drafting, plain)
        speeds = {id(stream): stream.run(_BLOCK_S) for stream in (first, second)}
        pairs.append((speeds[id(plain)], speeds[id(drafting)]))
    return [with_drafts / without for without, with_drafts in pairs], statistics.median(speed for _, speed in pairs)


def _pocket_engine(load: int, *, with_draft: bool) -> Engine:
    config = EngineConfig(
        max_num_seqs=load, max_num_batched_tokens=2048, enable_prefix_caching=False, max_waiting=2 * load
    )
    draft = pocket.pocket_small_folder() if with_draft else None
    return Engine.from_folder(pocket.pocket_large_folder(), draft=draft, config=config)


def _timed(engine: Engine, prompts: Sequence[list[int]]) -> tuple[list[int], float]:
    """Return the greedy answer to the first prompt, and the seconds from the end of prefill to the last token."""
    params = SamplingParams(temperature=0.0, max_tokens=_OUTPUT, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(GenerationRequest(str(number), prompt, params))
    tokens: list[int] = []

    def step() -> None:
        for output in engine.step():
            if output.request_id == "0":
                tokens.extend(output.token_ids)

    step()
    while engine.reads_prompts:
        step()
    started = time.perf_counter()
    while engine.has_work:
        step()
    return tokens, time.perf_counter() - started
