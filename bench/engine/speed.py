"""Speed of the cloud engine alone: throughput, decoding, prefill, prefix cache and start."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...cloud_engine.engine.config import EngineConfig
from ...cloud_engine.engine.engine import Engine
from ...cloud_engine.models.decoder import Decoder
from ...protocol.safety.system import child_environment, python_command
from ...protocol.sampling import SamplingParams
from ..shared.workload import WorkloadRequest
from .ceilings import MatrixProducts, matmul_flops, memory_bandwidth
from .driving import BUDGET, GREEDY, add, engine_config, make_engine, serve

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, seed=0)
_PREFIX_TOKENS = 4096
_PREFIX_S = 20  # minimum seconds to measure the cost of prefix lookups that find nothing
_SMALL = EngineConfig(max_num_seqs=8, max_num_batched_tokens=BUDGET, enable_prefix_caching=False)


def serving_time(
    model: Decoder, requests: Sequence[WorkloadRequest], running: int, params: SamplingParams = GREEDY
) -> float:
    """Return the seconds until all requests are served, at most `running` at a time."""
    return serve(make_engine(model, engine_config(len(requests), running)), requests, params)


def sampled_over_greedy(model: Decoder, requests: Sequence[WorkloadRequest], running: int, rounds: int = 5) -> float:
    """Return the speed of `SAMPLED` answers over the speed of greedy ones: the median of `rounds` pairs of runs."""
    return statistics.median(
        serving_time(model, requests, running, GREEDY) / serving_time(model, requests, running, SAMPLED)
        for _ in range(rounds)
    )


def decode_figures(model: Decoder, weight_bytes: int, tokens: int = 24, rounds: int = 5) -> dict[str, float]:
    """Measure the decoding speed of one and of eight sequences, and the share of memory bandwidth for one sequence.

    Figures are medians of `rounds`. The bandwidth is measured before and after each round.
    """
    device, engine = model.embed_tokens.weight.device, make_engine(model, _SMALL)
    alone, eight, shares = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        before = memory_bandwidth(device)
        alone.append(decode_speed(engine, 1, tokens))
        shares.append(alone[-1] * weight_bytes / statistics.mean((before, memory_bandwidth(device))))
        eight.append(decode_speed(engine, 8, tokens) / alone[-1])
    return {
        "decode_tokens_per_s": statistics.median(alone),
        "batch8_over_batch1": statistics.median(eight),
        "decode_bandwidth_share": statistics.median(shares),
        "memory_gb_per_s": memory_bandwidth(device) / 1e9,
    }


def prefill_figures(model: Decoder, products: MatrixProducts, length: int = 448) -> dict[str, float]:
    """Measure the prefill speed of single prompts of `length` tokens, and its share of the measured matmul speed."""
    engine = make_engine(model, _SMALL)
    speeds = [length / serve(engine, [WorkloadRequest([number + 1] * length, 1)]) for number in range(3)]
    speed = statistics.median(speeds)
    return {
        "prefill_tokens_per_s": speed,
        "prefill_matmul_share": speed * products.flops_per_token / matmul_flops(model.embed_tokens.weight),
    }


def prefix_figures(model: Decoder, pairs: int = 7) -> dict[str, float]:
    """Measure the time to the first token of a long prompt with a cached prefix, over the time without it. Also measure
    the cost of prefix lookups that find nothing: seconds with the cache over seconds without the cache, minus one.

    The long prompt is shortened to the model's context if necessary.
    """
    length = min(_PREFIX_TOKENS, model.config.context_length - 32)
    ratios: list[float] = []
    started = time.perf_counter()
    while len(ratios) < pairs or time.perf_counter() - started < _PREFIX_S:
        base = len(ratios) * 1000
        requests = [
            WorkloadRequest([(base + number * 7 + i) % model.config.vocab_size for i in range(256)], 4)
            for number in range(4)
        ]
        order = (False, True) if len(ratios) % 2 else (True, False)
        took = {use: serve(make_engine(model, replace(_SMALL, enable_prefix_caching=use)), requests) for use in order}
        ratios.append(took[True] / took[False])
    return {
        "prefix_tokens": length,
        "prefix_warm_over_cold_ttft": _warm_over_cold(model, length),
        "prefix_cost_zero_hits": statistics.median(ratios) - 1,
    }


def start_figures(folder: Path, dtype: str, device: str) -> dict[str, float]:
    """Measure the time from the start of a fresh process to its first token."""
    command = python_command("-m", "updraft.bench.engine.first_token", str(folder), dtype, device)
    started = time.perf_counter()
    with subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - started
    if line.strip() != "first token":
        raise RuntimeError(f"{' '.join(command)} exited without a token")
    return {"seconds_to_first_token": seconds}


def _warm_over_cold(model: Decoder, length: int) -> float:
    shared = [token % model.config.vocab_size for token in range(length)]
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=BUDGET, num_gpu_blocks_override=2 * length // 16 + 8)
    engine = make_engine(model, config)
    cold_s, *warm_s = [serve(engine, [WorkloadRequest([*shared, 7], 1)]) for _ in range(4)]
    return statistics.median(warm_s) / cold_s


def decode_speed(engine: Engine, batch: int, tokens: int) -> float:
    """Return the tokens per second of `batch` answers of `tokens` tokens, without the prompts' step."""
    add(engine, [WorkloadRequest([number + 1] * 16, tokens) for number in range(batch)])
    engine.step()  # the prefill step
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    return batch * (tokens - 1) / (time.perf_counter() - started)
