"""The limits of engine modes, computed from measured step times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import astuple
from pathlib import Path

from ..engine.config import MODES, Mode, ModeLimits, usual_limits
from .step_time import StepContent, StepTimeModel, read_costs

_GAIN = 1.05  # minimum gain in tokens per second that justifies doubling the batch size or the chunk
_CONTEXT = 512  # assumed context of each request, in tokens
_CHUNKS = [2**power for power in range(6, 14)]  # candidate numbers of prompt tokens in a step
_MAX_DRAFT = 8  # maximum draft tokens per request
_ACCEPTANCE = 0.8  # assumed acceptance rate of drafts
_SLACK = 2.0  # ratio of the step time limit to the time of a step with a full batch and chunk
_MAX_STEP_MS = 60_000


def limits_from(file: Path | None, mode: Mode, max_step_ms: int | None = None, device: str = "cpu") -> ModeLimits:
    """Return a mode's limits, from a file with measured step times if there is one, else the defaults of `device`.

    `file`: written by `updraft bench engine --only steps`. Raises ConfigurationError.
    """
    return usual_limits(mode, device) if file is None else measured_limits(read_costs(file), mode, max_step_ms)


def measured_limits(costs: StepTimeModel, mode: Mode, max_step_ms: int | None = None) -> ModeLimits:
    """Compute a mode's limits from measured costs.

    `latency`: the largest sizes whose steps take at most `max_step_ms`. `throughput`: sizes doubled as long as this
    increases the throughput. `balanced`: the geometric means of the two.
    """
    fastest = _throughput(costs)
    if mode == "throughput":
        return fastest
    quickest = _latency(costs, fastest, max_step_ms or MODES["latency"].max_step_ms)
    if mode == "latency":
        return quickest
    return ModeLimits(*(round(math.sqrt(a * b)) for a, b in zip(astuple(quickest), astuple(fastest), strict=True)))


def _throughput(costs: StepTimeModel) -> ModeLimits:
    sizes = [2**power for power in range(costs.largest_batch.bit_length())]
    batch = _knee(sizes, lambda size: _step_s(costs, size))
    chunk = _knee(_CHUNKS, lambda tokens: _step_s(costs, 1, tokens))
    full_ms = math.ceil(1e3 * _SLACK * _step_s(costs, batch, chunk))
    return ModeLimits(batch, batch + chunk, min(full_ms, _MAX_STEP_MS), _drafts(costs, batch))


def _latency(costs: StepTimeModel, fastest: ModeLimits, max_step_ms: int) -> ModeLimits:
    """Return the limits of `latency`, at most those of `throughput`: larger limits would only slow down streams."""
    limit_s = max_step_ms / 1e3
    batch = _largest(range(1, fastest.max_num_seqs + 1), lambda size: _step_s(costs, size) <= limit_s)
    most = fastest.max_num_batched_tokens - fastest.max_num_seqs
    chunks = (tokens for tokens in _CHUNKS if tokens <= most)
    chunk = _largest(chunks, lambda tokens: _step_s(costs, batch, tokens) <= limit_s)
    return ModeLimits(batch, batch + chunk, min(max_step_ms, fastest.max_step_ms), _drafts(costs, 1))


def _step_s(costs: StepTimeModel, sequences: int, prompt_tokens: int = 0) -> float:
    """Return the seconds of a step with one token for each request and a chunk of one more request's prompt."""
    pairs = prompt_tokens * (_CONTEXT + prompt_tokens // 2)
    return costs.seconds(StepContent(1, sequences, prompt_tokens, sequences * _CONTEXT, pairs, min(1, prompt_tokens)))


def _drafts(costs: StepTimeModel, sequences: int) -> int:
    """Return the draft length with the most tokens per second. Draft tokens are assumed to cost like prompt tokens."""

    def tokens_per_s(drafted: int) -> float:
        expected = sum(_ACCEPTANCE**number for number in range(drafted + 1))
        return expected / costs.seconds(StepContent(1, sequences, sequences * drafted, sequences * _CONTEXT, 0))

    return max(range(1, _MAX_DRAFT + 1), key=tokens_per_s)


def _knee(sizes: Iterable[int], seconds: Callable[[int], float]) -> int:
    """Return the largest of `sizes` (powers of two) with a noticeably higher throughput than at half that size."""
    return _largest(sizes, lambda size: seconds(size) * _GAIN <= 2 * seconds(size // 2))


def _largest(sizes: Iterable[int], fits: Callable[[int], bool]) -> int:
    """Return the largest of `sizes` that fits, or the first one if none fits."""
    first, *larger = sizes
    return max((size for size in larger if fits(size)), default=first)
