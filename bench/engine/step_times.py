"""Step times for `updraft plan`, and errors of the plan's simulation compared with a real engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count, islice
from random import Random

import numpy as np

from ...cloud_engine.engine.config import EngineConfig
from ...cloud_engine.engine.engine import Engine
from ...cloud_engine.engine.types.request import GenerationRequest
from ...cloud_engine.engine.types.request_state import ScheduledRequest
from ...cloud_engine.engine.worker.served_model import ServedModel
from ...cloud_engine.models.decoder import Decoder
from ...cloud_engine.planning.simulation import NodeShape, SimulatedAnswer, simulate
from ...cloud_engine.planning.step_fit import fit
from ...cloud_engine.planning.step_time import StepContent, StepTimeModel
from ...cloud_engine.planning.trace import PlannedRequest
from ..shared.workload import Workload, WorkloadRequest, draw
from .driving import GREEDY, engine_config

#: Request rates, as shares of the highest throughput.
LOADS = (0.3, 0.6, 0.9)
Clock = Callable[[], float]
_ROUNDS = 2
_MAX_OUTPUT = 32  # maximum tokens per answer
_TURN = 40  # other steps measured in one call of `turn`
_QUANTILES = {"p50": 50, "p99": 99}


class _Recording(Engine):
    """An engine that records the content and the time of each step. The time is measured by `clock` from the end of the
    previous step, so that it includes the time to add requests.
    """

    def __init__(self, model: Decoder, config: EngineConfig, clock: Clock) -> None:
        super().__init__(ServedModel(model), config)
        self.clock = clock
        self.steps: list[tuple[StepContent, float]] = []
        self._content: StepContent | None = None
        self._ended = clock()

    def take(self, number: int, work: WorkloadRequest) -> None:
        params = replace(GREEDY, max_tokens=work.output, ignore_eos=True)
        self.add_request(GenerationRequest(str(number), work.prompt, params))

    def resume(self) -> None:
        """Restart the clock for the next step, to exclude work outside the engine."""
        self._ended = self.clock()

    def _execute(self, batch: Sequence[ScheduledRequest]) -> None:
        self._content = StepContent.of(batch)
        super()._execute(batch)

    def timed_step(self) -> list[str]:
        """Run and record a step; return the requests that got a token."""
        came = [output.request_id for output in self.step()]
        started, self._ended = self._ended, self.clock()
        if self._content is not None:
            self.steps.append((self._content, self._ended - started))
        return came


def measured_steps(
    model: Decoder, running: int, workload: Workload, clock: Clock, seed: int = 1
) -> Iterator[tuple[StepContent, float]]:
    """Yield steps of batches from one to `running` requests. A new request replaces each finished one.

    Prompts come from the workload; every second prompt is cut, so that chunks of all lengths occur. Answers are short.
    """
    between = (3 * 2**power // 2 for power in range(1, (running // 3).bit_length() + 1))
    sizes = sorted({running, *(2**power for power in range(running.bit_length())), *between})
    random, short = Random(workload.seed + seed), min(workload.max_output, _MAX_OUTPUT)
    for size in sizes:
        other_workload = replace(workload, count=2 * size, max_output=short, seed=random.getrandbits(32))
        drawn = draw(other_workload, model.config.vocab_size)
        drawn[::2] = [
            replace(work, prompt=work.prompt[: round(len(work.prompt) ** random.random())]) for work in drawn[::2]
        ]
        engine = _Recording(model, replace(engine_config(len(drawn), running), max_num_seqs=size), clock)
        coming, remaining = enumerate(drawn), [work.output for work in drawn]
        places = size
        while True:
            for number, work in islice(coming, places):
                engine.take(number, work)
            if not engine.has_work:
                break
            came = [int(name) for name in engine.timed_step()]
            for number in came:
                remaining[number] -= 1
            places = sum(not remaining[number] for number in came)
            yield engine.steps[-1]
            engine.resume()


def measured_step_time(model: Decoder, running: int, workload: Workload) -> StepTimeModel:
    rounds = (measured_steps(model, running, workload, time.perf_counter, seed) for seed in range(_ROUNDS))
    return fit(list(chain.from_iterable(rounds)))


def simulation_errors(model: Decoder, running: int, workload: Workload, say: Callable[[str], None]) -> dict[str, float]:
    """Return, by load, the relative error of simulated throughput, time to first token, and time per output token.

    Requests arrive at random times. Step costs are measured with other requests, alternating with the real run, because
    other processes sometimes slow the machine down. On a CPU, all times are processor time.
    """
    clock = time.process_time if model.embed_tokens.weight.device.type == "cpu" else time.perf_counter
    other_workload = chain.from_iterable(measured_steps(model, running, workload, clock, seed) for seed in count(1))
    requests = draw(workload, model.config.vocab_size)
    config = engine_config(len(requests), running)
    # With few blocks, requests reuse memory as in a long-running node. (The first use of memory takes extra time.)
    num_blocks = running * (max(len(work.prompt) + work.output for work in requests) // config.block_size + 1)
    config = replace(config, num_gpu_blocks_override=num_blocks)
    measured = list(measured_steps(model, running, workload, clock, 0))
    least = len(measured)  # number of steps that covers batches of every size
    shape = NodeShape(config, fit(measured), num_blocks)
    all_now = [PlannedRequest(0.0, len(work.prompt), work.output) for work in requests]
    random = np.random.default_rng(workload.seed)
    real: dict[float, list[list[SimulatedAnswer]]] = {load: [] for load in LOADS}
    simulated: dict[float, list[list[SimulatedAnswer]]] = {load: [] for load in LOADS}
    for load in LOADS * _ROUNDS:
        fastest = len(requests) / max(served.last_s or 0.0 for served in simulate(all_now, shape, 1)[0])  # estimated
        arrived = np.cumsum(random.exponential(1 / (load * fastest), len(requests)))
        trace = [
            PlannedRequest(float(at_s), len(work.prompt), work.output)
            for at_s, work in zip(arrived - arrived[0], requests, strict=True)
        ]
        before = len(measured)
        engine = _Recording(model, config, clock)
        real[load].append(_run_real(engine, trace, requests, lambda: measured.extend(islice(other_workload, _TURN))))
        shape = replace(shape, costs=fit(measured[min(before, len(measured) - least) :]))
        simulated[load].append(simulate(trace, shape, 1)[0])
    errors: dict[str, float] = {}
    for load in LOADS:
        estimate, actual = _figures(simulated[load]), _figures(real[load])
        shown = (f"{name} {value:.4g} ({estimate[name]:.4g})" for name, value in actual.items())
        say(f"load {load:.0%}: " + ", ".join(shown))
        errors |= {f"simulation_{name}_error_{load:.0%}": estimate[name] / actual[name] - 1 for name in estimate}
    return errors


def _run_real(
    engine: _Recording, trace: Sequence[PlannedRequest], requests: Sequence[WorkloadRequest], turn: Callable[[], None]
) -> list[SimulatedAnswer]:
    """Run `requests` through a real engine, each added at its arrival time in `trace` by the engine's clock. Idle time
    is skipped. Now and then `turn` does other work, during which the clock is stopped.
    """
    served = [SimulatedAnswer(request) for request in trace]
    started, added = engine.clock(), 0
    while added < len(trace) or engine.has_work:
        if not engine.has_work:
            started = min(started, engine.clock() - trace[added].arrived_s)
        now = engine.clock() - started
        while added < len(trace) and (trace[added].arrived_s <= now or not engine.has_work):
            engine.take(added, requests[added])
            added += 1
        for name in engine.timed_step():
            answer, now = served[int(name)], engine.clock() - started
            answer.first_s = now if answer.first_s is None else answer.first_s
            answer.last_s = now
        if len(engine.steps) % (2 * _TURN) == 0:
            paused = engine.clock()
            turn()
            started += engine.clock() - paused
    return served


def _figures(rounds: Sequence[Sequence[SimulatedAnswer]]) -> dict[str, float]:
    served = [answer for answers in rounds for answer in answers]
    spent_s = sum(max(answer.last_s or 0.0 for answer in answers) for answers in rounds)
    figures = {"throughput": sum(answer.request.output for answer in served) / spent_s}
    for name, values in (("ttft", [work.ttft_s for work in served]), ("tpot", [work.tpot_s for work in served])):
        figures |= {f"{name}_{quantile}": float(np.percentile(values, at)) for quantile, at in _QUANTILES.items()}
    return figures
