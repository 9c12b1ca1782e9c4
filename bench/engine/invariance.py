"""Cost of batch-invariant mode, and how often answers depend on the rest of the batch without the mode."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ...cloud_engine.engine.config import EngineConfig
from ...cloud_engine.engine.engine import Engine
from ...cloud_engine.engine.worker.served_model import ServedModel
from ...cloud_engine.models.loading.loader import load_model
from ..shared.workload import WorkloadRequest
from .driving import add

_RUNNING = 32
_ROUNDS = 3


def invariance_figures(folder: Path, dtype: torch.dtype, requests: Sequence[WorkloadRequest]) -> dict[str, float]:
    """Return the cost and the effect of the batch-invariant mode.

    `batch_invariant_cost`: extra time of the mode, as a share, in the median of three pairs of runs. `divergence_rate`:
    without the mode, the share of greedy answers that differ between a request alone and in a batch.
    `divergence_rate_invariant`: the same share with the mode; it must be 0.
    """
    plain, invariant = (ServedModel(load_model(folder, dtype=dtype)) for _ in range(2))  # one per mode: packing differs
    pairs = [
        (_served(invariant, requests, invariant=True), _served(plain, requests, invariant=False))
        for _ in range(_ROUNDS)
    ]
    together_invariant, together = (answers for _, answers in pairs[-1])
    alone = [_served(plain, [request], invariant=False)[1][0] for request in requests]
    alone_invariant = [_served(invariant, [request], invariant=True)[1][0] for request in requests]
    return {
        "batch_invariant_cost": statistics.median(mode_s / plain_s for (mode_s, _), (plain_s, _) in pairs) - 1,
        "divergence_rate": _differing(alone, together),
        "divergence_rate_invariant": _differing(alone_invariant, together_invariant),
    }


def _served(
    served: ServedModel, requests: Sequence[WorkloadRequest], *, invariant: bool
) -> tuple[float, list[list[int]]]:
    """Return the seconds for all requests, and their answers."""
    config = EngineConfig(max_num_seqs=_RUNNING, max_waiting=len(requests), batch_invariant=invariant)
    engine = Engine(served, config)
    answers: list[list[int]] = [[] for _ in requests]
    add(engine, requests)
    started = time.perf_counter()
    while engine.has_work:
        for output in engine.step():
            answers[int(output.request_id)].extend(output.token_ids)
    return time.perf_counter() - started, answers


def _differing(answers: Sequence[list[int]], references: Sequence[list[int]]) -> float:
    return sum(one != other for one, other in zip(answers, references, strict=True)) / len(answers)
