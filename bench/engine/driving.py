"""Sends requests through an engine and measures the time."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...cloud_engine.engine.config import EngineConfig, usual_block_size
from ...cloud_engine.engine.engine import Engine
from ...cloud_engine.engine.types.request import GenerationRequest
from ...cloud_engine.engine.worker.devices import yields_to_other_processes
from ...cloud_engine.engine.worker.served_model import ServedModel
from ...cloud_engine.models.decoder import Decoder
from ...protocol.sampling import SamplingParams
from ..shared.workload import WorkloadRequest

BUDGET = 512
GREEDY = SamplingParams(temperature=0.0)
_TOKENS = 640  # maximum tokens per sequence, to size the KV cache on a CUDA device


def engine_config(requests: int, running: int) -> EngineConfig:
    """Return a configuration for throughput. At most `requests` requests are queued and `running` requests run at once,
    and each step computes up to 16 tokens per running request."""
    return EngineConfig(max_num_seqs=running, max_num_batched_tokens=16 * running, max_waiting=requests)


def make_engine(model: Decoder, config: EngineConfig, **options: Any) -> Engine:
    """Create an engine. On a CUDA device, first free unused memory, and limit the KV cache to the sequences' size,
    because by default an engine takes most of the free memory."""
    device = model.device
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        size = usual_block_size("cuda")
        blocks = config.num_gpu_blocks_override
        tokens = config.max_num_seqs * _TOKENS if blocks is None else blocks * config.block_size
        config = replace(config, device="cuda", block_size=size, num_gpu_blocks_override=-(-tokens // size))
    return Engine(ServedModel(model), config, **options)


def serve(engine: Engine, requests: Sequence[WorkloadRequest], params: SamplingParams = GREEDY) -> float:
    """Return the seconds from the first request to the end of the last."""
    threads = torch.get_num_threads()
    yield_to_other_processes = yields_to_other_processes(engine.config)  # as a deployed engine does
    started = time.perf_counter()
    add(engine, requests, params)
    try:
        while engine.has_work:
            yield_to_other_processes()
            engine.step()
    finally:
        torch.set_num_threads(threads)  # restore all threads for the next measurement
    return time.perf_counter() - started


def add(engine: Engine, requests: Sequence[WorkloadRequest], params: SamplingParams = GREEDY) -> None:
    for number, request in enumerate(requests):
        own_params = replace(params, max_tokens=request.output, ignore_eos=True)
        engine.add_request(GenerationRequest(str(number), request.prompt, own_params))
