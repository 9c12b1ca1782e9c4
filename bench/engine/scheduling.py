"""Measurements of the scheduler without a real model: sizes of the steps, and waste in KV blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...cloud_engine.engine.config import EngineConfig
from ...cloud_engine.engine.kv.kv_cache_manager import KVCacheManager
from ...cloud_engine.engine.scheduling.scheduler import Scheduler
from ...cloud_engine.engine.speculation.speculator import Speculator
from ...cloud_engine.engine.types.prediction import PredictionCursor
from ...cloud_engine.engine.types.request import GenerationRequest
from ...cloud_engine.engine.types.request_state import RequestState
from ...cloud_engine.models.config import ModelConfig
from ...cloud_engine.models.decoder import Decoder
from ...cloud_engine.models.rope import RotaryConfig
from ...protocol.sampling import ResolvedParams, SamplingParams
from ..shared.workload import Workload, WorkloadRequest, draw

VOCABULARY = 32


def step_rows(requests: Sequence[WorkloadRequest], config: EngineConfig) -> list[tuple[int, int]]:
    """Return (tokens computed, tokens sampled) of each step until all requests are answered."""
    return [rows for _, _, rows in _played(requests, config)]


def kv_waste(workload: Workload, running: int = 64) -> float:
    """Return the share of unused token slots in used blocks, over all steps, at the workload's real lengths."""
    requests = draw(Workload(512, max_prompt=8192, max_output=2048, seed=workload.seed, trace=workload.trace), 32)
    config = EngineConfig(
        max_num_seqs=running, max_num_batched_tokens=2048, max_waiting=len(requests), num_gpu_blocks_override=2**16
    )
    wasted = used = 0
    for scheduler, cache, _ in _played(requests, config):
        wasted += cache.num_wasted_slots(scheduler.running)
        used += cache.pool.num_used * cache.block_size
    return wasted / used


def _played(
    requests: Sequence[WorkloadRequest], config: EngineConfig
) -> Iterator[tuple[Scheduler, KVCacheManager, tuple[int, int]]]:
    """Schedule all requests without a model. Yield (scheduler, cache, (tokens computed, tokens sampled)) per step."""
    blocks = config.num_gpu_blocks_override or sum(
        (len(work.prompt) + work.output) // config.block_size + 1 for work in requests
    )
    cache = KVCacheManager(blocks, config.block_size, enable_prefix_caching=False)
    scheduler = Scheduler(config, cache, Speculator([], config))
    greedy = ResolvedParams(temperature=0.0)
    for number, work in enumerate(requests):
        request = GenerationRequest(str(number), work.prompt, SamplingParams(max_tokens=work.output))
        tokens, cursor = list(work.prompt), PredictionCursor([])
        scheduler.add(RequestState(request, work.output, greedy, 0, frozenset(), tokens, cursor))
    while scheduler.running or scheduler.waiting:
        batch = scheduler.schedule()
        rows = sum(item.num_tokens for item in batch), sum(item.num_samples for item in batch)
        for item in batch:
            item.state.num_computed_tokens += item.num_tokens
        yield scheduler, cache, rows
        for item in batch:
            if item.state.num_computed_tokens == len(item.state.token_ids):
                item.state.token_ids.append(0)
                if item.state.num_remaining_tokens == 0:
                    scheduler.remove(item.state)


def smallest_model(context_length: int = 4096) -> Decoder:
    """Return a model of one layer with zero weights."""
    rotary = RotaryConfig.from_parameters({}, rotary_dim=4, context_length=context_length)
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=4,
        intermediate_size=4,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        context_length=context_length,
        rms_norm_eps=1e-5,
        rotary=rotary,
        tie_word_embeddings=True,
    )
    model = Decoder(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    return model
