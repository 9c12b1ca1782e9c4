"""Prometheus counters of relayed requests, summed over all workers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from ....protocol.errors import UpdraftError
from ....protocol.http.prometheus import Distribution
from ..ledger.metering import RESPONSE_CACHE, UsageRow
from .shared_rows import Name, Numbers, SharedRows

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
#: Names of the sums that begin the row of a model and tier. The columns of three histograms follow.
SUMS = ("prompt", "completion", "cached", "accepted", "rejected", "cost", "streams", "streams_within")
_OBSERVED = len(SECONDS) + 2  # columns of one histogram: the buckets, one bucket above all bounds, and the sum
#: Index of each histogram's first column.
_STARTS = {name: len(SUMS) + index * _OBSERVED for index, name in enumerate(("e2e", "ttft", "tpot"))}


@dataclass(frozen=True, slots=True)
class ServiceObjective:
    """Latency objective for streams, set by the operator."""

    # Maximum time to the first token, in seconds.
    ttft_s: float = 1.0
    # Maximum time per token after the first, in seconds.
    tpot_s: float = 0.1


class Counters:
    """Counters since the start of the gateway."""

    def __init__(
        self, rows: SharedRows | None = None, worker: int = 0, objective: ServiceObjective | None = None
    ) -> None:
        self.rows = rows or SharedRows()
        self.own = self.rows.row(worker)
        self._objective = objective or ServiceObjective()

    def count(self, row: UsageRow, *, is_served: bool = True) -> None:
        """Count a finished request. `is_served`: whether a node serves the model, so that its name may be a label."""
        self.own.of("status", str(row.status))[0] += 1
        self.own.of("retries")[0] += row.retries
        self.own.of("kept")[0] += row.node == RESPONSE_CACHE
        if not row.key_name:
            return
        sums = self.own.of("model", row.model if is_served else "other", row.tier)
        cost = row.cost_usd or 0.0
        tokens = row.prompt_tokens, row.completion_tokens
        more = *tokens, row.cached_tokens, row.accepted_prediction_tokens, row.rejected_prediction_tokens, cost
        for column, number in enumerate(more):
            sums[column] += number
        _observe(sums, "e2e", row.latency_ms / 1e3)
        key = self.own.of("key", row.key_name)
        for column, number in enumerate((1, *tokens, cost)):
            key[column] += number

    def streamed(self, row: UsageRow, seconds: float) -> None:
        """Count a stream that completed `seconds` after the request arrived."""
        if row.ttft_ms is None:
            return
        sums, ttft_s = self.own.of("model", row.model, row.tier), row.ttft_ms / 1e3
        tpot_s = (seconds - ttft_s) / (row.completion_tokens - 1) if row.completion_tokens > 1 else 0.0
        _observe(sums, "ttft", ttft_s)
        if row.completion_tokens > 1:
            _observe(sums, "tpot", tpot_s)
        sums[SUMS.index("streams")] += 1
        is_within = ttft_s <= self._objective.ttft_s and tpot_s <= self._objective.tpot_s
        sums[SUMS.index("streams_within")] += is_within

    def refused(self, error: UpdraftError, limit: str | None) -> None:
        """Count a request that ended in an error. `limit`: the kind of limit reached, if any."""
        self.own.of("error", error.type)[0] += 1
        if limit is not None:
            self.own.of("limit", limit)[0] += 1

    @property
    def by_model(self) -> Mapping[Name, ModelSums]:
        return {name: ModelSums(numbers) for name, numbers in sorted(self.rows.sums("model").items())}


class ModelSums:
    """The counters of one model and tier."""

    def __init__(self, numbers: list[float]) -> None:
        self._numbers = numbers

    def sum(self, name: str) -> float:
        return self._numbers[SUMS.index(name)]

    def distribution(self, name: str) -> Distribution:
        """Return the distribution of `e2e`, `ttft` or `tpot`, in seconds."""
        *counts, total = self._numbers[_STARTS[name] : _STARTS[name] + _OBSERVED]
        return Distribution(SECONDS, [int(count) for count in counts], total)


def _observe(numbers: Numbers, name: str, seconds: float) -> None:
    numbers[_STARTS[name] + bisect_left(SECONDS, seconds)] += 1
    numbers[_STARTS[name] + _OBSERVED - 1] += seconds
