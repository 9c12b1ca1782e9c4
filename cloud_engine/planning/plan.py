"""Capacity plans: the nodes needed for a latency objective, their cost, and the effect of design choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...protocol.errors import ConfigurationError
from ..engine.config import MODES, settings_of
from .mode_limits import measured_limits
from .simulation import NodeShape, SimulatedAnswer, simulate
from .step_time import StepContent
from .trace import PlannedRequest, faster, sample

_RATES = (0.5, 0.8, 1.25, 2.0)  # factors by which the sensitivity analysis multiplies the trace's request rate


@dataclass(frozen=True, slots=True)
class PlanObjective:
    """The latency objective."""

    # Maximum time to the first token, in seconds.
    ttft_s: float
    # Maximum time per token after the first, in seconds.
    tpot_s: float
    # Minimum share of requests that meet both times.
    share: float = 0.99

    def is_met_by(self, served: SimulatedAnswer) -> bool:
        return served.ttft_s <= self.ttft_s and served.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """Simulated results of a fleet of nodes under the load."""

    nodes: int
    # Share of requests that meet the objective.
    share: float
    # Requests that no node accepted.
    refused: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    # Answer tokens per second, from the first arrival to the last answer.
    tokens_per_s: float
    # Share of the time between first arrival and last answer in which a node computes, averaged over the nodes.
    busy: float
    # Share of empty token slots in the KV blocks held by requests.
    kv_waste: float
    # US dollars per million answer tokens; None without a price.
    usd_per_million: float | None = None


@dataclass(frozen=True, slots=True)
class Planner:
    """Finds out how many nodes of a given shape can serve a trace within a latency objective."""

    trace: Sequence[PlannedRequest]
    shape: NodeShape
    objective: PlanObjective
    usd_per_hour: float | None = None
    # Maximum number of nodes to try.
    most_nodes: int = 64

    def figures(self, nodes: int) -> FleetFigures:
        served, fleet = simulate(self.trace, self.shape, nodes)
        answered = [each for each in served if each.last_s is not None]
        if not answered:
            message = "No request of the trace fits on a node. Raise --max-model-len or --num-gpu-blocks-override."
            raise ConfigurationError(message, param="trace")
        end_s = max(each.last_s for each in answered if each.last_s is not None)
        tokens = sum(each.request.output for each in answered)
        ttft_p50, ttft_p99 = np.percentile([each.ttft_s for each in answered], (50, 99))
        tpot_p50, tpot_p99 = np.percentile([each.tpot_s for each in answered], (50, 99))
        usd = None if self.usd_per_hour is None else self.usd_per_hour * nodes * end_s / 3600 / tokens * 1e6
        return FleetFigures(
            nodes,
            sum(map(self.objective.is_met_by, served)) / len(served),
            len(served) - len(answered),
            float(ttft_p50),
            float(ttft_p99),
            float(tpot_p50),
            float(tpot_p99),
            tokens / end_s,
            sum(node.busy_s for node in fleet) / nodes / end_s,
            sum(node.kv_waste for node in fleet) / nodes,
            usd,
        )

    def smallest(self) -> list[FleetFigures]:
        """Search for the smallest sufficient fleet, and return all fleets tried, by size.

        Raises ConfigurationError if even the largest fleet is too small."""
        tried: dict[int, FleetFigures] = {}

        def meets_objective(nodes: int) -> bool:
            tried[nodes] = self.figures(nodes)
            return tried[nodes].share >= self.objective.share

        low, high = 0, 1
        while not meets_objective(high):
            if high >= self.most_nodes:
                raise ConfigurationError(
                    f"Even {high} nodes meet the objective for only {tried[high].share:.1%} of the requests. "
                    "Loosen the objective, or plan with faster nodes.",
                    param="objective",
                )
            low, high = high, min(2 * high, self.most_nodes)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if meets_objective(middle) else (middle, high)
        return [tried[nodes] for nodes in sorted(tried)]

    def sufficient_fleet(self) -> FleetFigures:
        """Return the smallest fleet that meets the objective."""
        return next(each for each in self.smallest() if each.share >= self.objective.share)

    def sensitivity(self) -> dict[str, int | None]:
        """Return the nodes needed at multiples of the request rate; None if more than `most_nodes` are needed."""
        nodes: dict[str, int | None] = {}
        for rate in _RATES:
            try:
                nodes[f"{rate:g}"] = replace(self, trace=faster(self.trace, rate)).sufficient_fleet().nodes
            except ConfigurationError:  # more nodes than allowed; other rates may need fewer
                nodes[f"{rate:g}"] = None
        return nodes

    def with_device(self, cloud_share: float) -> FleetFigures:
        """Return the smallest sufficient fleet if only the share `cloud_share` of requests reaches the cloud."""
        left = sample(self.trace, cloud_share)
        if not left:
            raise ConfigurationError(
                "The cloud's share of the trace has no requests. Use a longer trace.", param="cloud_share"
            )
        return replace(self, trace=left).sufficient_fleet()

    def by_mode(self, nodes: int) -> dict[str, FleetFigures]:
        """Return the results of `nodes` nodes in each engine mode, with limits computed from the step costs."""
        config = self.shape.config
        limits = {mode: settings_of(measured_limits(self.shape.costs, mode)) for mode in MODES}
        shapes = {mode: replace(self.shape, config=replace(config, **given)) for mode, given in limits.items()}
        return {mode: replace(self, shape=shape).figures(nodes) for mode, shape in shapes.items()}

    def preallocated(self, nodes: int) -> FleetFigures:
        """Return the results of `nodes` nodes if each request preallocates KV memory for a whole context."""
        config, slots = self.shape.config, self.shape.num_blocks * self.shape.config.block_size
        length = config.max_model_len or max(row.prompt + row.output for row in self._servable())
        places = slots // length
        if not places:
            message = "The KV cache is smaller than one context. Raise --num-gpu-blocks-override."
            raise ConfigurationError(message, param="num_gpu_blocks_override")
        whole = replace(config, block_size=length, enable_prefix_caching=False)
        return replace(self, shape=replace(self.shape, config=whole, num_blocks=places)).figures(nodes)

    def static_tokens_per_s(self) -> tuple[float, float]:
        """Return answer tokens per second of one saturated node: with continuous batching and with static batches."""
        patient = replace(self.shape, config=replace(self.shape.config, max_waiting=len(self.trace)))
        saturated = replace(self, trace=[replace(row, arrived_s=0.0) for row in self._servable()], shape=patient)
        return saturated.figures(1).tokens_per_s, self._static()

    def _static(self) -> float:
        """Return tokens per second with static batches: padded prompts, and no new request until all answers end."""
        rows, costs, size = self._servable(), self.shape.costs, self.shape.config.max_num_seqs
        seconds = 0.0
        for first in range(0, len(rows), size):
            batch = rows[first : first + size]
            count, prompt, output = len(batch), max(row.prompt for row in batch), max(row.output for row in batch)
            pairs = count * prompt * prompt // 2
            seconds += costs.seconds(StepContent(1, count, count * (prompt - 1), 0, pairs, count))
            decodes = (StepContent(1, count, 0, count * context, 0) for context in range(prompt, prompt + output - 1))
            seconds += sum(map(costs.seconds, decodes))
        return sum(row.output for row in rows) / seconds

    def _servable(self) -> list[PlannedRequest]:
        longest = self.shape.num_blocks * self.shape.config.block_size
        longest = min(longest, self.shape.config.max_model_len or longest)
        return [row for row in self.trace if row.prompt + row.output <= longest]
