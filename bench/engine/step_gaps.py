"""Idle time of a GPU between the steps of an engine, which is the host's overhead seen from the device.

Gaps inside a step are not the host's, because the kernels of a step run from a captured CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ...cloud_engine.models.decoder import Decoder
from ..shared.workload import WorkloadRequest
from .driving import add, engine_config, make_engine

_STEPS, _WARM_STEPS, _PROMPT = 50, 20, 64
_TO_HOST, _COPIES = "Memcpy DtoH", ("Memcpy", "Memset")  # names of memory operations in the profiler


class Activity(NamedTuple):
    """An activity on the device; times in microseconds."""

    start: float
    end: float
    name: str


def step_gaps(model: Decoder, sequences: int) -> dict[str, float]:
    """Decode `sequences` sequences. Return `step_gap_share`, the share of time in which the GPU idles between steps.

    `step_idle_share` also counts the gaps between the kernels of a step. `step_us` is the time of a step. The profiler
    slows the host down, so all figures are upper bounds.
    """
    engine = make_engine(model, engine_config(sequences, sequences))
    length = _WARM_STEPS + _STEPS + 40
    vocabulary = model.config.vocab_size
    add(
        engine,
        [WorkloadRequest([(number + at) % vocabulary for at in range(_PROMPT)], length) for number in range(sequences)],
    )
    while engine.reads_prompts:
        engine.step()
    for _ in range(_WARM_STEPS):
        engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(_STEPS):
            engine.step()
        torch.cuda.synchronize()
    ran = [
        Activity(event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]
    idle, wall = idle_time(ran)
    return {"step_gap_share": between_steps(ran) / wall, "step_idle_share": idle / wall, "step_us": wall / _STEPS}


def between_steps(ran: Iterable[Activity]) -> float:
    """Return the idle time between steps. A step ends with a copy to the host, so the host's overhead lies between the
    last kernel before that copy and the first kernel after it. Copies count as busy time."""
    ordered = sorted(ran)
    kernels = [activity for activity in ordered if not activity.name.startswith(_COPIES)]
    gaps: set[tuple[float, float]] = set()
    for copy in ordered:
        if copy.name.startswith(_TO_HOST):
            before = max((kernel.end for kernel in kernels if kernel.start < copy.start), default=None)
            after = min((kernel.start for kernel in kernels if kernel.start >= copy.start), default=None)
            if before is not None and after is not None and before < after:
                gaps.add((before, after))
    return sum(_idle_within(ordered, *gap) for gap in gaps)


def _idle_within(ran: Sequence[Activity], start: float, end: float) -> float:
    within = [Activity(max(start, activity.start), min(end, activity.end), "") for activity in ran]
    edges = [Activity(start, start, ""), Activity(end, end, "")]
    return idle_time([*edges, *(activity for activity in within if activity.start < activity.end)])[0]


def idle_time(ran: Iterable[Activity]) -> tuple[float, float]:
    """Return the time in which nothing ran, between the first start and the last end, and the length of that span.
    The activities in `ran` may overlap and have any order. Raises ValueError if `ran` is empty."""
    ordered = sorted(ran)
    if not ordered:
        raise ValueError("the profile has no activity on the device")
    first, reached, _ = ordered[0]
    idle = 0.0
    for start, end, _ in ordered:
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    return idle, reached - first
