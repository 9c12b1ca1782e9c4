"""Warm-up: measure step times, and on a GPU compile kernels and capture CUDA graphs before the first request.

Triton compiles a kernel at its first launch, which takes seconds. The compiled kernels are cached on disk.
"""

# torch leaves `tolist` untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from ....kernels.runtime.backend import kernel_cache, num_multiprocessors
from ....kernels.runtime.numeric import next_power_of_2
from ....kernels.sampling.launch import split_row
from ....protocol.sampling import ResolvedParams
from ....text.grammars.state import Mask
from ....text.logit_edits import LogitEditor, LogitEdits
from ..config import MAX_DRAFT_TOKENS, EngineConfig
from .cuda_graphs import GraphLimits
from .model_runner import Runner
from .sampler import SamplingRows, log_probabilities, packed_options, sample

_LOG = logging.getLogger(__name__)
_MAX_ROWS = 512  # maximum rows to warm up sampling for; only two variants handle more, and both compile quickly
_MAX_QUERIES = 128  # maximum tokens per sequence to warm up; longer ones use the same attention kernels
_REPORTED = (0, 20)  # numbers of top log-probabilities to warm up
_DRAFTS = (0, 1, 4, 16, 64, 256)  # draft tokens per sequence to measure
_EXTENSION = 4  # passes of a draft model to measure in one call
_GREEDY = ResolvedParams(temperature=0.0)
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
    lengths = prompt_lengths(min(max_num_batched_tokens, runner.context_length))
    passes = [runner.compute_zeros([length], 1) for length in lengths]
    most = max_num_batched_tokens if limits is None else limits.rows
    for number in row_counts(most, passes[-1].shape[1], num_multiprocessors(passes[-1].device)):
        _sample(passes[-1].repeat(number, 1))
    new, seconds = _entries(cache) - before, time.perf_counter() - started
    _LOG.info("warm-up took %.1f s: %d kernels compiled, cached in %s", seconds, new, cache)


def largest_step(runner: Runner, config: EngineConfig) -> None:
    """Compute the largest step, while the logits of another one are unread, and sample it in every way.

    The step has as many sequences as possible. Overwrites the KV cache.
    """
    tokens = config.max_num_batched_tokens
    length = min(-(-tokens // config.max_num_seqs), runner.model.config.context_length)
    lengths = [length] * (tokens // length) + [tokens % length] * (tokens % length > 0)
    num_logits = -(-min(tokens, config.max_num_seqs + MAX_DRAFT_TOKENS) // len(lengths))
    unread = runner.compute_zeros(lengths, num_logits)
    _sample(runner.compute_zeros(lengths, num_logits))
    del unread


def step_profile(runner: Runner, config: EngineConfig) -> dict[tuple[int, int], float]:
    """Measure the seconds of steps by (sequences, draft tokens per sequence). Overwrites the KV cache.

    Each step is measured several times, in turns, and the fastest counts, because other processes disturb single ones.
    Slow models are only measured with one sequence and with a full batch, without drafts and with one draft token.
    """
    factor = 4 if runner.runs_ahead else 16  # between batch sizes: on CPUs, matrix products take memory for each size
    sizes = sorted({min(factor**power, config.max_num_seqs) for power in range(8)})
    most = min(config.max_num_batched_tokens, runner.context_length, _MAX_ROWS if runner.runs_ahead else _MAX_CPU_ROWS)
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
    batch, rows, taken_s = runner.zeros([_EXTENSION] * sequences), _alike(sequences, _GREEDY), list[float]()
    for _ in range(_REPEATS):
        started = time.perf_counter()
        runner.extend([0] * sequences, batch, rows)
        taken_s.append(time.perf_counter() - started)
    return min(taken_s) / _EXTENSION


def _step_s(runner: Runner, sequences: int, drafts: int) -> float:
    """Return the seconds of a step that verifies `drafts` tokens of each sequence."""
    started = time.perf_counter()
    logits = runner.compute_zeros([1 + drafts] * sequences, 1 + drafts)
    sample(logits, _alike(len(logits), _GREEDY)).tolist()
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
    for rows in _variants(number, vocabulary):
        sample(logits, rows)
    for num_top in _REPORTED:
        log_probabilities(logits, [0] * number, min(num_top, vocabulary))


def _variants(number: int, vocabulary: int) -> Iterator[SamplingRows]:
    """Yield rows of each sampling variant: each truncation with and without a grammar mask, then a logit bias."""
    mask = np.full(-(-vocabulary // 32), -1, dtype=np.int32)
    by_rank, by_mass, by_share = ResolvedParams(top_k=5), ResolvedParams(top_p=0.9), ResolvedParams(min_p=0.1)
    in_all_ways = ResolvedParams(top_k=5, top_p=0.9, min_p=0.1)
    for params in (ResolvedParams(), by_rank, by_mass, by_share, in_all_ways):
        yield _alike(number, params)
        yield _alike(number, params, mask=mask)
    biased = ResolvedParams(temperature=0.0, logit_bias=((0, 1.0),))
    yield _alike(number, biased, edits=LogitEditor(biased, (), ()).edits())


def _alike(
    number: int, params: ResolvedParams, *, mask: Mask | None = None, edits: LogitEdits | None = None
) -> SamplingRows:
    """Return `number` rows with the same parameters."""
    options, rows = packed_options([params], [1]).repeat(number, axis=1), range(number)
    masks = {} if mask is None else dict.fromkeys(rows, mask)
    return SamplingRows(options, np.ones(number, np.int64), masks, {} if edits is None else dict.fromkeys(rows, edits))


def _entries(cache: Path) -> int:
    return sum(1 for _ in cache.iterdir()) if cache.is_dir() else 0
