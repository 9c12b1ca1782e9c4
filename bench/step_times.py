"""What steps take, for `updraft plan`, and how far its simulation is from a real engine under the same load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..cloud_engine.engine.config import EngineConfig
from ..cloud_engine.engine.engine import Engine
from ..cloud_engine.engine.execution.launched_step import LaunchedStep
from ..cloud_engine.engine.execution.served_model import ServedModel
from ..cloud_engine.engine.types.request import GenerationRequest
from ..cloud_engine.engine.types.request_state import ScheduledRequest
from ..cloud_engine.models.decoder import Decoder
from ..cloud_engine.planning.simulation import NodeShape, SimulatedAnswer, simulate
from ..cloud_engine.planning.step_time import StepContent, StepTimeModel, fit
from ..cloud_engine.planning.trace import PlannedRequest
from .driving import GREEDY, add, engine_config
from .workload import Workload, WorkloadRequest, draw

#: Shares of the highest throughput at which requests come.
LOADS = (0.3, 0.6, 0.9)
Clock = Callable[[], float]
_ROUNDS = 3  # of each batch size
_QUANTILES = {"p50": 50, "p99": 99}


class _Recording(Engine):
    """An engine that keeps what its steps computed, and what they took by the `clock`."""

    def __init__(self, model: Decoder, config: EngineConfig, clock: Clock) -> None:
        super().__init__(ServedModel(model), config)
        self.clock = clock
        self.steps: list[tuple[StepContent, float]] = []
        self._content: StepContent | None = None

    def _launch(self, batch: list[ScheduledRequest]) -> LaunchedStep:
        self._content = StepContent.of(batch)
        return super()._launch(batch)

    def timed_step(self) -> list[str]:
        """Whose tokens came out."""
        started = self.clock()
        outputs = self.step()
        if self._content is not None:
            self.steps.append((self._content, self.clock() - started))
        return [output.request_id for output in outputs]


def measured_step_time(
    model: Decoder, running: int, workload: Workload, clock: Clock = time.perf_counter
) -> StepTimeModel:
    """From batches of every size, with prompts and answers of the workload."""
    steps: list[tuple[StepContent, float]] = []
    for round_number in range(_ROUNDS):
        for size in sorted({running, *(2**power for power in range(running.bit_length()))}):
            drawn = draw(
                replace(workload, count=3 * size, seed=workload.seed + 1 + round_number), model.config.vocab_size
            )
            engine = _Recording(model, replace(engine_config(len(drawn), running), max_batch_size=size), clock)
            add(engine, drawn)
            while engine.has_work:
                engine.timed_step()
            steps += engine.steps
    return fit(steps)


def simulation_errors(model: Decoder, running: int, workload: Workload, say: Callable[[str], None]) -> dict[str, float]:
    """By load: simulated over real, less one, of the throughput, of the time to the first token, and of that per token.

    Requests come at random moments. The costs of steps are from other requests than these. On a CPU all is in seconds
    of the processor, of which neighbours take none.
    """
    clock = time.process_time if model.embed_tokens.weight.device.type == "cpu" else time.perf_counter
    costs = measured_step_time(model, running, workload, clock)
    requests = draw(workload, model.config.vocab_size)
    config = engine_config(len(requests), running)
    num_blocks = sum((len(work.prompt) + work.output) // config.block_size + 1 for work in requests)
    shape = NodeShape(replace(config, prefix_caching=False, num_blocks=num_blocks), costs, num_blocks)
    at_once, _ = simulate([PlannedRequest(0.0, len(work.prompt), work.output) for work in requests], shape, 1)
    fastest = len(requests) / max(served.last_s or 0.0 for served in at_once)
    random = np.random.default_rng(workload.seed)
    found: dict[str, float] = {}
    for load in LOADS:
        gaps = random.exponential(1 / (load * fastest), len(requests))
        trace = [
            PlannedRequest(float(arrived), len(work.prompt), work.output)
            for arrived, work in zip(np.cumsum(gaps) - gaps[0], requests, strict=True)
        ]
        real = _really(_Recording(model, shape.config, clock), trace, requests)
        simulated, _ = simulate(trace, shape, 1)
        ours, theirs = _figures(simulated), _figures(real)
        say(f"load {load:.0%}: " + ", ".join(f"{name} {theirs[name]:.4g} ({ours[name]:.4g})" for name in ours))
        found |= {f"simulation_{name}_error_{load:.0%}": ours[name] / theirs[name] - 1 for name in ours}
    return found


def _really(
    engine: _Recording, trace: Sequence[PlannedRequest], requests: Sequence[WorkloadRequest]
) -> list[SimulatedAnswer]:
    """The same requests through a real engine, at the same times by its clock, which idle times are added to."""
    served = [SimulatedAnswer(request) for request in trace]
    started, added = engine.clock(), 0
    while added < len(trace) or engine.has_work:
        now = engine.clock() - started
        while added < len(trace) and trace[added].arrived_s <= now:
            wanted = replace(GREEDY, max_tokens=trace[added].output, ignore_eos=True)
            engine.add_request(GenerationRequest(str(added), requests[added].prompt, wanted))
            added += 1
        if not engine.has_work:
            started -= max(0.0, trace[added].arrived_s - now)
            continue
        for name in engine.timed_step():
            each, now = served[int(name)], engine.clock() - started
            each.first_s = now if each.first_s is None else each.first_s
            each.last_s = now
    return served


def _figures(served: Sequence[SimulatedAnswer]) -> dict[str, float]:
    end_s = max(each.last_s or 0.0 for each in served)
    figures = {"throughput": sum(each.request.output for each in served) / end_s}
    for name, values in (("ttft", [each.ttft_s for each in served]), ("tpot", [each.tpot_s for each in served])):
        figures |= {f"{name}_{quantile}": float(np.percentile(values, at)) for quantile, at in _QUANTILES.items()}
    return figures
