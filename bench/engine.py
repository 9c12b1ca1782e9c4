"""`updraft bench engine`: our engine and its peers on the same weights and the same requests, in one run."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..cloud_engine.engine.config import EngineConfig
from ..cloud_engine.engine.engine import Engine
from ..cloud_engine.engine.request import GenerationRequest
from ..cloud_engine.engine.served_model import ServedModel
from ..cloud_engine.engine.threads import giving_way
from ..cloud_engine.models.decoder import Decoder
from ..cloud_engine.models.loader import load_model
from ..embedded import pocket
from ..kernels.host_memory import keep_freed_memory
from ..protocol.sampling import SamplingParams
from . import peers, speculation
from .ceilings import MatrixProducts, matmul_flops, memory_bandwidth
from .invariance import invariance_figures
from .scheduling import kv_waste, scheduler_microseconds, step_rows, turnover_microseconds
from .workload import Asked, Workload, draw

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_RUNNING = 32
_BUDGET = 512
_PREFIX_TOKENS = {"": 4096, "_8k": 8192}  # by the end of the figure's name
_PREFIX_S = 20  # at least, for what a cache costs that finds nothing
#: (blocks of 256 tokens, tokens per step) that transformers' continuous batching is tried with; the best one counts.
CB_SETTINGS = ((64, 512), (128, 1024), (128, 2048))
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, top_p=0.9, seed=0)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """What to measure. `peers`: of transformers; `speculation`: also drafts. Both take most of the time."""

    folder: Path
    dtype: str = "bfloat16"
    workload: Workload = field(default_factory=Workload)
    threads: int | None = None
    device: str = "cpu"
    peers: Literal["all", "static", "none"] = "all"
    speculation: bool = True

    @property
    def is_pocket(self) -> bool:
        """Whether the models that come with the package are measured: small, and trained."""
        return self.folder == pocket.pocket_large_folder()


def measure(setting: Setting, say: Say) -> dict[str, float]:
    """Flat figures by name; `vs_*` are our tokens per second over theirs."""
    keep_freed_memory()  # as the engine's process does; the peers profit, too
    if setting.threads is not None:
        torch.set_num_threads(setting.threads)
    figures = {"seconds_to_first_token": seconds_to_first_token(setting)}
    say(f"first token {figures['seconds_to_first_token']:.1f} s after the start of a process")
    model = load_model(setting.folder, dtype=DTYPES[setting.dtype], device=setting.device)
    requests = draw(setting.workload, model.config.vocab_size)
    tokens = sum(asked.output for asked in requests)
    say(f"{len(requests)} requests, {sum(len(a.prompt) for a in requests):,} tokens in, {tokens:,} out")
    products = MatrixProducts(model)  # before the engine rearranges the weights
    ours_s = throughput(model, requests)
    ceiling_s = products.seconds(step_rows(requests, engine_config(len(requests))))
    figures |= {"tokens_per_s": tokens / ours_s, "output_tokens": tokens, "matmul_ceiling_share": ceiling_s / ours_s}
    say(f"ours: {tokens / ours_s:,.0f} tokens/s, {ceiling_s / ours_s:.0%} of what its matrix products alone allow")
    figures["drawn_over_greedy"] = drawn_over_greedy(model, requests[:_RUNNING])
    say(f"drawn at temperature {DRAWN.temperature}, top_p {DRAWN.top_p}: {figures['drawn_over_greedy']:.2f} of greedy")
    figures |= decode_figures(model, products.weight_bytes)
    say(f"decode: {figures['decode_tokens_per_s']:.1f} tokens/s alone, {figures['batch8_over_batch1']:.2f}x with eight")
    figures |= prefill_figures(model, products)
    say(f"prefill: {figures['prefill_tokens_per_s']:,.0f} tokens/s")
    figures |= prefix_figures(model)
    say(f"prefix cache: {figures['prefix_warm_over_cold_ttft']:.3f} of the time to a first token when warm")
    say(f"where it finds nothing: {figures['prefix_cost_zero_hits']:+.1%} time")
    figures |= {
        "scheduler_us_256": scheduler_microseconds(),
        "scheduler_us_256_turnover": turnover_microseconds(),
        "kv_waste": kv_waste(setting.workload),
    }
    steady, turnover = figures["scheduler_us_256"], figures["scheduler_us_256_turnover"]
    say(f"scheduler: {steady:.0f} us a step at 256 sequences, {turnover:.0f} where they come and go")
    if setting.device == "cpu":  # where the mode can be had
        figures |= invariance_figures(
            setting.folder,
            DTYPES[setting.dtype],
            requests[: _RUNNING if setting.is_pocket else 8],
        )
        say(f"batch-invariant mode: {figures['batch_invariant_cost']:+.1%} time")
        say(f"without it {figures['divergence_rate']:.0%} of greedy answers depend on the batch")
    if setting.speculation:
        figures |= speculation.measure(None if setting.is_pocket else model, say)
    if setting.peers != "none":
        figures |= _peer_figures(setting, requests, lambda: throughput(model, requests), say)
    return figures


def throughput(model: Decoder, requests: Sequence[Asked], params: SamplingParams = GREEDY) -> float:
    """Seconds for all requests, at most 32 running."""
    engine = Engine(ServedModel(model), engine_config(len(requests)))
    started = time.perf_counter()
    _serve(engine, requests, params)
    return time.perf_counter() - started


def drawn_over_greedy(model: Decoder, requests: Sequence[Asked], rounds: int = 5) -> float:
    """Tokens per second where they are drawn (`DRAWN`) over those where they are greedy: a median of pairs of runs."""
    return statistics.median(
        throughput(model, requests, GREEDY) / throughput(model, requests, DRAWN) for _ in range(rounds)
    )


def decode_figures(model: Decoder, weight_bytes: int, tokens: int = 24, rounds: int = 5) -> dict[str, float]:
    """Decoding alone and by eight, after short prompts; and the share of memory bandwidth that decoding alone uses.

    Medians of `rounds`, with the bandwidth measured before and after each of them.
    """
    device = model.embed_tokens.weight.device
    alone: list[float] = []
    eight: list[float] = []
    shares: list[float] = []
    for _ in range(rounds):
        before = memory_bandwidth(device)
        alone.append(_decode_speed(model, 1, tokens))
        shares.append(alone[-1] * weight_bytes / statistics.mean((before, memory_bandwidth(device))))
        eight.append(_decode_speed(model, 8, tokens) / alone[-1])
    return {
        "decode_tokens_per_s": statistics.median(alone),
        "batch8_over_batch1": statistics.median(eight),
        "decode_bandwidth_share": statistics.median(shares),
        "memory_gb_per_s": memory_bandwidth(device) / 1e9,
    }


def prefill_figures(model: Decoder, products: MatrixProducts, length: int = 448) -> dict[str, float]:
    """Prompts of `length` tokens one after the other, and the share of the measured matmul peak that they reach."""
    speeds: list[float] = []
    for number in range(3):
        started = time.perf_counter()
        _serve(_engine(model, prefix_caching=False), [Asked([number + 1] * length, 1)])
        speeds.append(length / (time.perf_counter() - started))
    speed = statistics.median(speeds)
    flops = speed * products.flops_per_token
    return {
        "prefill_tokens_per_s": speed,
        "prefill_matmul_share": flops / matmul_flops(model.embed_tokens.weight),
    }


def prefix_figures(model: Decoder, pairs: int = 7) -> dict[str, float]:
    """Time to the first token of a long prompt when its prefix is cached over the time when it is not; and what
    looking for a prefix costs where there is none: seconds with the cache over seconds without, less one.

    Prompts are as long as the context allows, if that is less; of 8,192 tokens only where it allows them.
    """
    longest = model.config.context_length - 32
    figures: dict[str, float] = {"prefix_tokens": min(_PREFIX_TOKENS[""], longest)}
    for end, length in _PREFIX_TOKENS.items():
        if not end or length <= longest:
            figures[f"prefix_warm_over_cold_ttft{end}"] = _warm_over_cold(model, min(length, longest))
    ratios: list[float] = []
    started = time.perf_counter()
    while len(ratios) < pairs or time.perf_counter() - started < _PREFIX_S:
        base = len(ratios) * 1000
        asked = [
            Asked([(base + number * 7 + i) % model.config.vocab_size for i in range(256)], 4) for number in range(4)
        ]
        order = (False, True) if len(ratios) % 2 else (True, False)
        took = {caching: _seconds(_engine(model, prefix_caching=caching), asked) for caching in order}
        ratios.append(took[True] / took[False])
    return {**figures, "prefix_cost_zero_hits": statistics.median(ratios) - 1}


def _warm_over_cold(model: Decoder, length: int) -> float:
    shared = [token % model.config.vocab_size for token in range(length)]
    engine = _engine(model, num_blocks=2 * length // 16 + 8)
    cold_s, *warm_s = [_seconds(engine, [Asked([*shared, 7], 1)]) for _ in range(4)]
    return statistics.median(warm_s) / cold_s


def seconds_to_first_token(setting: Setting) -> float:
    """From the start of a fresh process to its first token."""
    command = [sys.executable, "-m", "updraft.bench.first_token", str(setting.folder), setting.dtype, setting.device]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - started
    if line.strip() != "first token":
        raise RuntimeError(f"{' '.join(command)} ended without a token")
    return seconds


def engine_config(requests: int) -> EngineConfig:
    """The engine of the throughput figures."""
    return EngineConfig(max_batch_size=_RUNNING, token_budget=_BUDGET, max_waiting=requests)


def _engine(model: Decoder, **options: Any) -> Engine:
    return Engine(ServedModel(model), EngineConfig(max_batch_size=8, token_budget=_BUDGET, **options))


def _decode_speed(model: Decoder, batch: int, tokens: int) -> float:
    engine = _engine(model, prefix_caching=False)
    _add(engine, [Asked([number + 1] * 16, tokens) for number in range(batch)])
    engine.step()  # the prompts
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    return batch * (tokens - 1) / (time.perf_counter() - started)


def _seconds(engine: Engine, requests: Sequence[Asked]) -> float:
    started = time.perf_counter()
    _serve(engine, requests)
    return time.perf_counter() - started


def _serve(engine: Engine, requests: Sequence[Asked], params: SamplingParams = GREEDY) -> None:
    threads = torch.get_num_threads()
    give_way = giving_way(engine.config)  # as the engine's process does
    _add(engine, requests, params)
    try:
        while engine.has_work:
            give_way()
            engine.step()
    finally:
        torch.set_num_threads(threads)  # what is measured next gets all of them


def _add(engine: Engine, requests: Sequence[Asked], params: SamplingParams = GREEDY) -> None:
    for number, asked in enumerate(requests):
        wanted = replace(params, max_tokens=asked.output, ignore_eos=True)
        engine.add_request(GenerationRequest(str(number), asked.prompt, wanted))


def _peer_figures(setting: Setting, requests: Sequence[Asked], ours: Callable[[], float], say: Say) -> dict[str, float]:
    """Their seconds over ours, which are taken before and after each of them: the machine may change meanwhile."""
    model = peers.load(setting.folder, DTYPES[setting.dtype], setting.device)
    ours_s = [ours()]

    def beside(theirs: Callable[[], float], name: str) -> float:
        theirs_s = theirs()
        ours_s.append(ours())
        ratio = theirs_s / statistics.mean(ours_s[-2:])
        say(f"transformers, {name}: {ratio:.2f}x our time")
        return ratio

    static = beside(lambda: peers.static_batches(model, requests, _RUNNING), f"static batches of {_RUNNING}")
    figures = {"vs_transformers_static": static}
    if setting.peers == "static":
        return figures
    ratios = [
        beside(
            lambda blocks=blocks, tokens=tokens: peers.continuous_batching(model, requests, blocks, tokens),
            f"continuous batching, {blocks} blocks, {tokens} tokens",
        )
        for blocks, tokens in CB_SETTINGS
    ]
    return {**figures, "vs_transformers_cb": min(ratios)}
