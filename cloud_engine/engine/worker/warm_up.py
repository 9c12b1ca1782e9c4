"""Warm-up: measure step times, and on a GPU compile kernels and capture CUDA graphs before the first request.

Triton compiles a kernel at its first launch, which takes seconds. The compiled kernels are cached on disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from ....kernels.attention.types import QuerySpan
from ....kernels.runtime.backend import kernel_cache, num_multiprocessors
from ....kernels.runtime.numeric import next_power_of_2
from ....kernels.sampling.launch import split_row
from ....protocol.sampling import ResolvedParams
from ....text.logit_edits import LogitEditor
from ...models.causal_model import CausalModel
from ..config import MAX_DRAFT_TOKENS, EngineConfig
from .cuda_graphs import GraphLimits
from .model_runner import Chunk, Runner
from .sampler import SamplingRow, log_probabilities, sample

_LOG = logging.getLogger(__name__)
_MAX_ROWS = 512  # maximum rows to warm up sampling for; only two variants handle more, and both compile quickly
_MAX_QUERIES = 128  # maximum tokens per sequence to warm up; longer ones use the same attention kernels
_REPORTED = (0, 20)  # numbers of top log-probabilities to warm up
_DRAFTS = (0, 1, 4, 16, 64, 256)  # draft tokens per sequence to measure
_EXTENSION = 4  # passes of a draft model to measure in one call
_GREEDY = SamplingRow(1, 1, ResolvedParams(temperature=0.0))
_MAX_CPU_ROWS = 64  # maximum rows to measure on a CPU: further rows take as long each, and logits take memory
_REPEATS = 4  # runs per measured step
_PROFILE_S = 2.0  # seconds after which measuring ends


def make_ready(runner: Runner, limits: GraphLimits | None, max_num_batched_tokens: int) -> None:
    """Capture CUDA graphs within `limits` and launch all other kernels once. Does nothing on a CPU.

    Call this while the KV cache is empty, because the warm-up overwrites it.
    """
    if not runner.runs_ahead:
        return
    started, cache = time.perf_counter(), kernel_cache()
    before = _entries(cache)
    if limits is not None:
        runner.capture(limits)
    passes = [
        runner.run([_prompt(runner, length)])
        for length in prompt_lengths(min(max_num_batched_tokens, runner.num_slots))
    ]
    most = max_num_batched_tokens if limits is None else limits.rows
    for number in row_counts(most, passes[-1].shape[1], num_multiprocessors(passes[-1].device)):
        _sample(passes[-1].repeat(number, 1))
    new, seconds = _entries(cache) - before, time.perf_counter() - started
    _LOG.info("warm-up took %.1f s: %d kernels compiled, cached in %s", seconds, new, cache)


def largest_step(runner: Runner, config: EngineConfig) -> None:
    """Compute the largest step, while the logits of another one are unread, and sample it in every way.

    Overwrites the KV cache, which must hold `longest_chunk`.
    """
    length, tokens = longest_chunk(runner.model, config), config.max_num_batched_tokens
    lengths = [length] * (tokens // length) + [tokens % length] * (tokens % length > 0)
    num_logits = -(-min(tokens, config.max_num_seqs + MAX_DRAFT_TOKENS) // len(lengths))
    chunks = [_prompt(runner, length, min(length, num_logits)) for length in lengths]
    unread = runner.run(chunks)
    _sample(runner.run(chunks))
    del unread


def longest_chunk(model: CausalModel, config: EngineConfig) -> int:
    """Return the tokens per sequence of the largest step, which has as many sequences as possible."""
    return min(-(-config.max_num_batched_tokens // config.max_num_seqs), model.config.context_length)


def step_profile(runner: Runner, config: EngineConfig) -> dict[tuple[int, int], float]:
    """Measure the seconds of steps by (sequences, draft tokens per sequence). Overwrites the KV cache.

    Each step is measured several times, in turns, and the fastest counts, because other processes disturb single ones.
    Slow models are only measured with one sequence and with a full batch, without drafts and with one draft token.
    """
    factor = 4 if runner.runs_ahead else 16  # between batch sizes: on CPUs, matrix products take memory for each size
    sizes = sorted({min(factor**power, config.max_num_seqs) for power in range(8)})
    most = min(config.max_num_batched_tokens, runner.num_slots, _MAX_ROWS if runner.runs_ahead else _MAX_CPU_ROWS)
    points = [(size, drafts) for drafts in _DRAFTS for size in sizes if drafts <= 1 or size * (1 + drafts) <= most]
    started, profile = time.perf_counter(), dict[tuple[int, int], float]()
    for size, drafts in points * _REPEATS:
        is_needed = (size, drafts) not in profile and drafts <= 1 and size in (1, config.max_num_seqs)
        if is_needed or time.perf_counter() - started < _PROFILE_S:
            seconds = _step_s(runner, size, drafts)
            profile[size, drafts] = min(seconds, profile.get((size, drafts), seconds))
    return {point: seconds for point, seconds in profile.items() if (point[0], 1) in profile}


def extension_s(runner: Runner, sequences: int) -> float:
    """Return the seconds per pass of `Runner.extend`. Overwrites the KV cache."""
    passes = min(_EXTENSION, runner.num_slots)
    blocks = range(-(-passes // runner.block_size))
    taken_s: list[float] = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        runner.extend([0] * sequences, [QuerySpan(0, passes, blocks)] * sequences, [_GREEDY] * sequences)
        taken_s.append(time.perf_counter() - started)
    return min(taken_s) / passes


def _step_s(runner: Runner, sequences: int, drafts: int) -> float:
    """Return the seconds of a step that verifies `drafts` tokens of each sequence."""
    started = time.perf_counter()
    sample(runner.run([_prompt(runner, 1 + drafts, 1 + drafts)] * sequences), [_GREEDY] * sequences * (1 + drafts))
    return time.perf_counter() - started


def prompt_lengths(most: int) -> list[int]:
    """Return prompt lengths that cover every variant of the attention kernels: powers of two up to the largest tile."""
    return [1 << power for power in range(_MAX_QUERIES.bit_length()) if 1 << power <= most]


def row_counts(most: int, vocabulary: int, multiprocessors: int) -> list[int]:
    """Return row counts up to `most`. Sampling these row counts compiles every variant of the merge kernel."""
    counts: dict[int, int] = {}
    for rows in range(1, min(most, _MAX_ROWS) + 1):
        counts.setdefault(next_power_of_2(split_row(rows, vocabulary, multiprocessors).programs), rows)
    return list(counts.values())


def _sample(logits: Tensor) -> None:
    """Launch every sampling variant, and log-probabilities with and without top tokens."""
    number, vocabulary = logits.shape
    for row in _rows(vocabulary):
        sample(logits, [row] * number)
    for num_top in _REPORTED:
        log_probabilities(logits, [0] * number, min(num_top, vocabulary))


def _prompt(runner: Runner, length: int, num_logits: int = 1) -> Chunk:
    return Chunk([0] * length, 0, range(-(-length // runner.block_size)), num_logits)


def _rows(vocabulary: int) -> Iterator[SamplingRow]:
    """Yield one row per sampling variant: each truncation with and without a grammar mask, then a logit bias."""
    mask = np.full(-(-vocabulary // 32), -1, dtype=np.int32)
    by_rank, by_mass, by_share = ResolvedParams(top_k=5), ResolvedParams(top_p=0.9), ResolvedParams(min_p=0.1)
    in_all_ways = ResolvedParams(top_k=5, top_p=0.9, min_p=0.1)
    for params in (ResolvedParams(), by_rank, by_mass, by_share, in_all_ways):
        yield SamplingRow(1, 1, params)
        yield SamplingRow(1, 1, params, mask=mask)
    biased = ResolvedParams(temperature=0.0, logit_bias=((0, 1.0),))
    yield SamplingRow(1, 1, biased, edits=LogitEditor(biased, (), ()).edits())


def _entries(cache: Path) -> int:
    return sum(1 for _ in cache.iterdir()) if cache.is_dir() else 0
