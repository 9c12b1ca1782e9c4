"""Simulation of nodes: the real scheduler, block manager and output processor in simulated time, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...protocol.sampling import ResolvedParams, SamplingParams
from ..engine.config import EngineConfig
from ..engine.kv.kv_cache_manager import KVCacheManager
from ..engine.output.output_processor import OutputProcessor
from ..engine.scheduling.scheduler import Scheduler
from ..engine.speculation.speculator import Speculator
from ..engine.step import StepResult
from ..engine.types.prediction import PredictionCursor
from ..engine.types.request import GenerationRequest
from ..engine.types.request_state import RequestState, ScheduledRequest
from .step_time import StepContent, StepTimeModel
from .trace import PlannedRequest

_ANSWER_TOKEN = 2**32 - 1  # token id of all simulated answers; occurs in no prompt and ends no answer


@dataclass(slots=True)
class SimulatedAnswer:
    """The times of one request, in seconds since the first arrival."""

    request: PlannedRequest
    first_s: float | None = None
    last_s: float | None = None
    # Whether the request was refused because it exceeds the context, or because the queue was full.
    refused: bool = False

    @property
    def ttft_s(self) -> float:
        return float("inf") if self.first_s is None else self.first_s - self.request.arrived_s

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        if self.first_s is None or self.last_s is None:
            return float("inf")
        return (self.last_s - self.first_s) / max(1, self.request.output - 1)


class SimulatedNode:
    """A simulated node. `kv_waste` is the share of empty token slots in blocks held by requests, over all steps."""

    def __init__(self, config: EngineConfig, costs: StepTimeModel, num_blocks: int, *, caching: bool = False) -> None:
        self._config, self._costs = config, costs
        self._cache = KVCacheManager(num_blocks, config.block_size, enable_prefix_caching=caching)
        self._speculator = Speculator([], config)
        self._scheduler = Scheduler(config, self._cache, self._speculator, fixed_rows=costs.fixed_rows())
        self._outputs = OutputProcessor(self._scheduler, self._cache, self._speculator)
        self._served: dict[str, SimulatedAnswer] = {}
        self._now_s = 0.0
        self._wasted = self._allocated = 0
        self.contents: list[StepContent] = []

    @property
    def tokens_in_flight(self) -> int:
        return sum(len(state.token_ids) for state in self._scheduler.requests())

    @property
    def kv_waste(self) -> float:
        return self._wasted / self._allocated if self._allocated else 0.0

    @property
    def busy_s(self) -> float:
        return sum(self._costs.seconds(content) for content in self.contents)

    def add(self, request: PlannedRequest, number: int) -> SimulatedAnswer:
        served, name = SimulatedAnswer(request), str(number)
        tokens = request.prompt + request.output
        context = self._config.max_model_len
        in_queue = len(self._scheduler.waiting)
        too_long = (context is not None and tokens > context) or not self._scheduler.fits(tokens)
        if too_long or in_queue >= self._config.max_waiting + self._config.max_num_seqs:
            served.refused = True
            return served
        if not self._scheduler.requests():
            self._now_s = max(self._now_s, request.arrived_s)
        self._served[name] = served
        params = SamplingParams(max_tokens=request.output, ignore_eos=True)
        prompt = request.prompt_ids(number)
        state = RequestState(
            GenerationRequest(name, prompt, params),
            request.output,
            ResolvedParams(temperature=0.0, ignore_eos=True),
            0,
            frozenset(),
            list(prompt),
            PredictionCursor([]),
            arrived=request.arrived_s,
        )
        self._outputs.begin([state])
        return served

    def run_until(self, time_s: float) -> None:
        """Run all steps that begin before `time_s`."""
        while self._now_s < time_s and (batch := self._scheduler.schedule()):
            self._step(batch)

    def _step(self, batch: Sequence[ScheduledRequest]) -> None:
        content = StepContent.of(batch)
        step_s = self._costs.seconds(content)
        self.contents.append(content)
        self._wasted += self._cache.num_wasted_slots(self._scheduler.running)
        self._allocated += self._cache.pool.num_used * self._cache.block_size
        self._now_s += step_s
        counts = [item.num_samples for item in batch]
        result = StepResult(self._scheduler.plan(batch).id, counts, [_ANSWER_TOKEN] * sum(counts))
        outputs = self._outputs.process(batch, result)
        self._speculator.observe(batch, step_s)
        self._scheduler.observe(len(batch), step_s)
        came = [*outputs.decoded.request_ids, *(output.request_id for output in outputs.token_outputs)]
        for name in came:
            served = self._served[name]
            served.first_s = self._now_s if served.first_s is None else served.first_s
            served.last_s = self._now_s


@dataclass(frozen=True, slots=True)
class NodeShape:
    """The parameters of a simulated node."""

    config: EngineConfig
    costs: StepTimeModel
    num_blocks: int


def simulate(
    trace: Sequence[PlannedRequest], shape: NodeShape, nodes: int
) -> tuple[list[SimulatedAnswer], list[SimulatedNode]]:
    """Simulate a fleet. Each request goes to the node with the fewest tokens in flight, whatever nodes have cached."""
    caching = shape.config.enable_prefix_caching and any(request.blocks for request in trace)
    needed = sum((row.prompt + row.output) // shape.config.block_size + 1 for row in trace)
    num_blocks = min(shape.num_blocks, needed)  # more blocks than all requests together need would only cost memory
    fleet = [SimulatedNode(shape.config, shape.costs, num_blocks, caching=caching) for _ in range(nodes)]
    served: list[SimulatedAnswer] = []
    for number, request in enumerate(trace):
        for node in fleet:
            node.run_until(request.arrived_s)
        served.append(min(fleet, key=lambda node: node.tokens_in_flight).add(request, number))
    for node in fleet:
        node.run_until(float("inf"))
    return served, fleet
