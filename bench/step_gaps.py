"""How long a GPU has nothing to do between the steps of an engine: what the host costs, seen from the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd.profiler_util import FunctionEvent

from ..cloud_engine.models.decoder import Decoder
from .driving import add, engine_config, make_engine
from .workload import Asked

_STEPS, _WARM_STEPS, _PROMPT = 50, 20, 64


def step_gaps(model: Decoder, sequences: int) -> dict[str, float]:
    """`step_gap_share`: of the time in which `sequences` decode, that in which nothing runs on the device.

    `step_us`: of such a step. Both under the profiler, which makes the host slower: they are upper bounds.
    """
    engine = make_engine(model, engine_config(sequences, sequences))
    length = _WARM_STEPS + _STEPS + 40
    vocabulary = model.config.vocab_size
    add(engine, [Asked([(number + at) % vocabulary for at in range(_PROMPT)], length) for number in range(sequences)])
    while engine.reads_prompts:
        engine.step()
    for _ in range(_WARM_STEPS):
        engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(_STEPS):
            engine.step()
        torch.cuda.synchronize()
    busy = [(event.time_range.start, event.time_range.end) for event in profiler.events() or () if _is_on_device(event)]
    idle, wall = idle_time(busy)
    return {"step_gap_share": idle / wall, "step_us": wall / _STEPS}


def idle_time(busy: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """From (start, end) of all that ran, in any order and overlapping: how long nothing did, between the first start
    and the last end; and how long that is. Raises ValueError where nothing ran."""
    spans = sorted(busy)
    if not spans:
        raise ValueError("nothing ran on the device")
    first, reached = spans[0]
    idle = 0.0
    for start, end in spans:
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    return idle, reached - first


def _is_on_device(event: FunctionEvent) -> bool:
    return event.device_type.name == "CUDA"
