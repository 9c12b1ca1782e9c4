"""`updraft bench engine`: our engine and its peers on the same weights and the same requests, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..cloud_engine.engine.config import EngineConfig
from ..cloud_engine.engine.engine import Engine
from ..cloud_engine.engine.request import GenerationRequest
from ..cloud_engine.engine.served_model import ServedModel
from ..cloud_engine.models.decoder import Decoder
from ..cloud_engine.models.loader import load_model
from ..protocol.sampling import SamplingParams
from . import peers
from .workload import Asked, Workload, draw

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_RUNNING = 32
#: (blocks of 256 tokens, tokens per step) that transformers' continuous batching is tried with; the best one counts.
CB_SETTINGS = ((64, 512), (128, 1024), (128, 2048))
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """What to measure. `peers`: also transformers, which takes most of the time."""

    folder: Path
    dtype: str = "bfloat16"
    workload: Workload = field(default_factory=Workload)
    threads: int | None = None
    peers: bool = True


def measure(setting: Setting, say: Say) -> dict[str, float]:
    """Flat figures by name; `vs_*` are our tokens per second over theirs."""
    if setting.threads is not None:
        torch.set_num_threads(setting.threads)
    dtype = _DTYPES[setting.dtype]
    model = load_model(setting.folder, dtype=dtype)
    requests = draw(setting.workload, model.config.vocab_size)
    tokens = sum(asked.output for asked in requests)
    say(f"{len(requests)} requests, {sum(len(a.prompt) for a in requests):,} tokens in, {tokens:,} out")
    seconds = throughput(model, requests)
    figures: dict[str, float] = {"tokens_per_s": tokens / seconds, "output_tokens": tokens}
    say(f"ours: {tokens / seconds:,.0f} tokens/s")
    figures |= decode_figures(model)
    say(f"decode: {figures['decode_tokens_per_s']:.1f} tokens/s alone, {figures['batch8_over_batch1']:.2f}x with eight")
    figures |= prefix_figures(model)
    say(f"prefix cache: {figures['prefix_warm_over_cold_ttft']:.3f} of the time to a first token when warm")
    figures |= scheduler_figures()
    say(f"scheduler: {figures['scheduler_us_256']:.0f} us a step at 256 sequences")
    del model
    if setting.peers:
        figures |= _peer_figures(setting, requests, seconds, say)
    return figures


def throughput(model: Decoder, requests: Sequence[Asked]) -> float:
    """Seconds for all requests, at most 32 running."""
    engine = engine_for(model, max_batch_size=_RUNNING, token_budget=512, max_waiting=len(requests))
    started = time.perf_counter()
    _serve(engine, requests)
    return time.perf_counter() - started


def decode_figures(model: Decoder, tokens: int = 48) -> dict[str, float]:
    """Decoding alone and by eight, after short prompts; and the share of memory bandwidth that decoding alone uses."""
    speeds: dict[int, float] = {}
    for batch in (1, 8):
        engine = engine_for(model, max_batch_size=8, prefix_caching=False)
        asked = [Asked([number + 1] * 16, tokens) for number in range(batch)]
        _add(engine, asked)
        engine.step()  # the prompts
        started = time.perf_counter()
        while engine.has_work:
            engine.step()
        speeds[batch] = batch * (tokens - 1) / (time.perf_counter() - started)
    read = sum(p.nbytes for p in model.parameters())
    if not model.config.tie_word_embeddings:
        read -= model.embed_tokens.weight.nbytes  # one row of it is read
    bandwidth = memory_bandwidth()
    return {
        "decode_tokens_per_s": speeds[1],
        "batch8_over_batch1": speeds[8] / speeds[1],
        "memory_gb_per_s": bandwidth / 1e9,
        "decode_bandwidth_share": speeds[1] * read / bandwidth,
    }


def memory_bandwidth(size: int = 2**28) -> float:
    """Bytes per second that a sum over float32 reads, the best of five."""
    data = torch.ones(size // 4)
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        data.sum()
        best = max(best, size / (time.perf_counter() - started))
    return best


def prefix_figures(model: Decoder) -> dict[str, float]:
    """Time to the first token of a long prompt whose prefix is cached, over the time when it is not."""
    length = min(4096, model.config.context_length - 32)
    shared = [token % model.config.vocab_size for token in range(length)]
    blocks = 2 * (model.config.context_length if length < 4096 else 4352) // 16
    engine = engine_for(model, max_batch_size=2, token_budget=512, num_blocks=blocks)
    times: list[float] = []
    for _ in range(3):
        started = time.perf_counter()
        _serve(engine, [Asked([*shared, 7], 1)])
        times.append(time.perf_counter() - started)
    return {"prefix_warm_over_cold_ttft": min(times[1:]) / times[0]}


def scheduler_figures(sequences: int = 256, steps: int = 200) -> dict[str, float]:
    """Microseconds of scheduling alone per step, every sequence decoding."""
    from ..cloud_engine.engine.kv_cache import KVCacheManager
    from ..cloud_engine.engine.prediction import PredictionCursor
    from ..cloud_engine.engine.request import RequestState
    from ..cloud_engine.engine.scheduler import Scheduler

    config = EngineConfig(max_batch_size=sequences, token_budget=8192, max_waiting=sequences)
    cache = KVCacheManager(sequences * 64, config.block_size)
    scheduler = Scheduler(config, cache)
    for number in range(sequences):
        prompt = [number % 97 + 1] * 32
        request = GenerationRequest(str(number), prompt, SamplingParams(max_tokens=steps + 8))
        scheduler.add(RequestState(request, steps + 8, 0.0, 0, frozenset(), list(prompt), PredictionCursor([])))
    spent = 0.0
    for step in range(steps):
        started = time.perf_counter()
        batch = scheduler.schedule()
        spent += time.perf_counter() - started if step else 0.0
        for item in batch:
            item.state.num_computed_tokens += item.num_tokens
            item.state.token_ids.append(step % 89)
    return {"scheduler_us_256": 1e6 * spent / (steps - 1)}


def engine_for(model: Decoder, **options: Any) -> Engine:
    return Engine(ServedModel(model), EngineConfig(**options))


def _serve(engine: Engine, requests: Sequence[Asked]) -> None:
    _add(engine, requests)
    while engine.has_work:
        engine.step()


def _add(engine: Engine, requests: Sequence[Asked]) -> None:
    for number, asked in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=asked.output, ignore_eos=True)
        engine.add_request(GenerationRequest(str(number), asked.prompt, params))


def _peer_figures(setting: Setting, requests: Sequence[Asked], ours_s: float, say: Say) -> dict[str, float]:
    model = peers.load(setting.folder, _DTYPES[setting.dtype])
    static_s = peers.static_batches(model, requests, _RUNNING)
    say(f"transformers, static batches of {_RUNNING}: {static_s / ours_s:.2f}x our time")
    figures = {"vs_transformers_static": static_s / ours_s}
    best = float("inf")
    for blocks, tokens in CB_SETTINGS:
        seconds = peers.continuous_batching(model, requests, blocks, tokens)
        say(f"transformers, continuous batching, {blocks} blocks, {tokens} tokens: {seconds / ours_s:.2f}x our time")
        best = min(best, seconds)
    return {**figures, "vs_transformers_cb": best / ours_s}
