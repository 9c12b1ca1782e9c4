"""Compile and capture what steps on a GPU need before the first request, and report it.

Triton compiles a kernel when it is first launched, for seconds in which everybody would wait. What it compiled is kept
on disk, so that the next start is short.
"""

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
from ....text.logit_edits import LogitEditor
from ..types.sampling_row import SamplingRow
from .cuda_graphs import GraphLimits
from .model_runner import Chunk, Runner
from .sampler import log_probabilities, sample

_LOG = logging.getLogger(__name__)
_MAX_ROWS = 512  # to sample: with more, what is left are two sizes that compile in a moment
_MAX_QUERIES = 128  # of a sequence: with more, attention is launched as with so many
_REPORTED = (0, 20)  # likeliest tokens beside the chosen one


def make_ready(runner: Runner, limits: GraphLimits | None, token_budget: int) -> None:
    """Capture steps within `limits`, and launch once what else there is; does nothing on a CPU.

    To be called while the KV cache is empty: it is written to.
    """
    if not runner.runs_ahead:
        return
    started, cache = time.perf_counter(), kernel_cache()
    before = _entries(cache)
    if limits is not None:
        runner.capture(limits)
    passes = [runner.run([_prompt(runner, length)]) for length in prompt_lengths(min(token_budget, runner.num_slots))]
    most = token_budget if limits is None else limits.sequences * limits.queries
    for number in row_counts(most, passes[-1].shape[1], num_multiprocessors(passes[-1].device)):
        _sample(passes[-1].repeat(number, 1))
    new, seconds = _entries(cache) - before, time.perf_counter() - started
    _LOG.info("ready in %.1f s: %d kernels compiled, kept in %s", seconds, new, cache)


def prompt_lengths(most: int) -> list[int]:
    """Tokens of a prompt for each way to launch attention: powers of two, as far as there are tiles of their own."""
    return [1 << power for power in range(_MAX_QUERIES.bit_length()) if 1 << power <= most]


def row_counts(most: int, vocabulary: int, multiprocessors: int) -> list[int]:
    """Of up to `most` rows to sample, one number for each size of kernel that a row's programs are put together by."""
    found: dict[int, int] = {}
    for rows in range(1, min(most, _MAX_ROWS) + 1):
        found.setdefault(next_power_of_2(split_row(rows, vocabulary, multiprocessors).programs), rows)
    return list(found.values())


def _sample(logits: Tensor) -> None:
    """In each way there is, and as many likeliest tokens as may be asked for."""
    number, vocabulary = logits.shape
    for row in _rows(vocabulary):
        sample(logits, [row] * number)
    for num_top in _REPORTED:
        log_probabilities(logits, [0] * number, min(num_top, vocabulary))


def _prompt(runner: Runner, length: int) -> Chunk:
    return Chunk([0] * length, 0, range(-(-length // runner.block_size)), 1)


def _rows(vocabulary: int) -> Iterator[SamplingRow]:
    """One for each way to sample: alone, cut in each way and in several, with a grammar, with a bias."""
    mask = np.full(-(-vocabulary // 32), -1, dtype=np.int32)
    by_rank, by_mass, by_share = ResolvedParams(top_k=5), ResolvedParams(top_p=0.9), ResolvedParams(min_p=0.1)
    in_all_ways = ResolvedParams(top_k=5, top_p=0.9, min_p=0.1)
    for params in (ResolvedParams(), by_rank, by_mass, by_share, in_all_ways):
        yield SamplingRow(1, 1, params)
        yield SamplingRow(1, 1, params, mask=mask)
    biased = ResolvedParams(temperature=0.0, logit_bias=((0, 1.0),))
    yield SamplingRow(1, 1, biased, edits=LogitEditor(biased, (), ()).edits())


def _entries(cache: Path) -> int:
    """Kernels that are kept."""
    return sum(1 for _ in cache.iterdir()) if cache.is_dir() else 0
