"""`/metrics` of the gateway: names and help texts of all metrics, summed over the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from ...protocol.http.prometheus import Histogram, Metric
from .balancing.registry import NodeRegistry
from .ledger.ledger import UsageLedger
from .relay.counters import Counters
from .relay.shared_rows import Name, SharedRows, WorkerRow

_PUBLISH_S = 0.5
_STATES = {"closed": 0.0, "half-open": 1.0, "open": 2.0}
_MODEL_SUMS = {
    "prompt_tokens": ("prompt", "prompt tokens"),
    "completion_tokens": ("completion", "completion tokens"),
    "cached_tokens": ("cached", "prompt tokens that nodes had cached"),
    "accepted_prediction_tokens": ("accepted", "tokens of predictions that the model accepted"),
    "rejected_prediction_tokens": ("rejected", "tokens of predictions that the model rejected"),
    "cost_usd": ("cost", "US dollars, for models with a price"),
    "slo_streams": ("streams", "streams that completed"),
    "slo_streams_met": ("streams_within", "completed streams within the objective (--slo-ttft-s, --slo-tpot-s)"),
}
_MODEL_TIMES = {
    "ttft": "time to first token of streams",
    "tpot": "time per output token of streams, after the first token",
    "e2e": "time from the request to the end of the answer",
}
_KEY_SUMS = {
    "requests": "requests by key",
    "prompt_tokens": "prompt tokens by key",
    "completion_tokens": "completion tokens by key",
    "cost_usd": "US dollars by key",
}


class WorkerGauges:
    """Publishes the state of a worker's nodes, queue and ledger in the worker's shared row."""

    def __init__(self, registry: NodeRegistry, ledger: UsageLedger, row: WorkerRow) -> None:
        self._registry = registry
        self._ledger = ledger
        self._row = row
        #: Counts of the worker that this worker replaces.
        self._before = {name: list(numbers) for name, numbers in row.items()}

    async def keep_published(self) -> None:
        """Publish the gauges periodically until cancelled."""
        while True:
            self.publish()
            await asyncio.sleep(_PUBLISH_S)

    def publish(self) -> None:
        nodes = {("node", node.url): node for node in self._registry.nodes}
        self._row.keep_only("node", nodes)
        self._before = {name: numbers for name, numbers in self._before.items() if name[0] != "node" or name in nodes}
        for name, node in nodes.items():
            breaker = node.breaker
            self._write(name, (node.healthy, _STATES[breaker.state], node.in_flight), breaker.trips)
        for priority, count in self._registry.queue.by_priority().items():
            self._write(("waiting", priority), (count,))
        ledger = self._ledger
        self._write(("ledger",), (ledger.failing, ledger.waiting), ledger.lost, ledger.failures)

    def _write(self, name: Name, gauges: tuple[float, ...], *counted: float) -> None:
        numbers, before = self._row.of(*name), self._before.get(name)
        for column, value in enumerate((*gauges, *counted)):
            is_counter = column >= len(gauges) and before is not None
            numbers[column] = value + before[column] if is_counter and before else value


def requests_in_flight(rows: SharedRows) -> dict[str, int]:
    """Return the number of requests in flight, by node URL."""
    return {url: int(numbers[2]) for (url,), numbers in rows.sums("node").items()}


def gateway_metrics(counters: Counters, *, with_keys: bool = True) -> list[Metric | Histogram]:
    """Return all metrics. `with_keys`: include metrics by key, for callers who may see the usage."""
    keys = _keys(counters.rows) if with_keys else []
    return [*_requests(counters), *_models(counters), *keys, *_nodes(counters.rows), *_ledger(counters)]


def _requests(counters: Counters) -> list[Metric]:
    rows = counters.rows
    return [
        _counter("requests", "requests by final status", _labelled(rows.sums("status"), "status")),
        _counter("refused", "requests that ended in an error, by error type", _labelled(rows.sums("error"), "type")),
        _counter("limits_hit", "requests refused by a limit, by kind of limit", _labelled(rows.sums("limit"), "limit")),
        Metric("updraft_gateway_retries_total", "counter", "fail-overs to another node", _first(rows, "retries")),
        _counter("hedges", "hedged requests to a second node, by outcome", _labelled(rows.sums("hedge"), "outcome")),
        Metric("updraft_gateway_cache_hits_total", "counter", "answers from the response cache", _first(rows, "kept")),
    ]


def _models(counters: Counters) -> list[Metric | Histogram]:
    models = {(("model", name[0]), ("tier", name[1])): sums for name, sums in counters.by_model.items()}
    return [
        *(
            _counter(name, text, {labels: sums.sum(column) for labels, sums in models.items()})
            for name, (column, text) in _MODEL_SUMS.items()
        ),
        *(
            Histogram(
                f"updraft_gateway_{name}_seconds",
                text,
                samples={labels: sums.distribution(name) for labels, sums in models.items()},
            )
            for name, text in _MODEL_TIMES.items()
        ),
    ]


def _keys(rows: SharedRows) -> list[Metric]:
    sums = rows.sums("key")
    return [
        _counter(f"key_{name}", text, _labelled(sums, "key", column))
        for column, (name, text) in enumerate(_KEY_SUMS.items())
    ]


def _nodes(rows: SharedRows) -> list[Metric]:
    """Return the metrics of nodes. Workers may briefly disagree about a node; the worst value counts."""
    named, sums = rows.named("node"), rows.sums("node")

    def of_all(column: int, choose: Callable[[list[float]], float]) -> dict[Name, list[float]]:
        return {name: [choose([numbers[column] for numbers in workers])] for name, workers in named.items()}

    waiting = _labelled(rows.sums("waiting"), "tier")
    return [
        _gauge("node_up", "1 if the node is healthy", _labelled(of_all(0, min), "node")),
        _gauge("node_breaker_state", "breaker: 0 closed, 1 half-open, 2 open", _labelled(of_all(1, max), "node")),
        _gauge("node_in_flight", "requests in flight on the node", _labelled(sums, "node", 2)),
        _counter("node_breaker_trips", "times a worker took the node out of rotation", _labelled(sums, "node", 3)),
        _gauge("waiting", "requests in the queue for a node", waiting),
    ]


def _ledger(counters: Counters) -> list[Metric]:
    workers = counters.rows.named("ledger").get((), [])
    failing = max((numbers[0] for numbers in workers), default=0)
    waiting, lost, failures = (sum(numbers[column] for numbers in workers) for column in (1, 2, 3))
    return [
        Metric("updraft_gateway_ledger_failing", "gauge", "1 if the last commit to the ledger failed", failing),
        Metric("updraft_gateway_ledger_waiting", "gauge", "rows not yet committed to the ledger", waiting),
        Metric("updraft_gateway_ledger_lost_total", "counter", "rows that could not be written and were lost", lost),
        Metric("updraft_gateway_ledger_failures_total", "counter", "commits to the ledger that failed", failures),
    ]


def _first(rows: SharedRows, kind: str) -> float:
    return rows.sums(kind).get((), [0.0])[0]


_Samples = Mapping[tuple[tuple[str, str], ...], float]


def _labelled(sums: Mapping[Name, list[float]], label: str, column: int = 0) -> _Samples:
    return {((label, name),): numbers[column] for (name,), numbers in sorted(sums.items())}


def _counter(name: str, text: str, samples: _Samples) -> Metric:
    return Metric(f"updraft_gateway_{name}_total", "counter", text, samples=samples)


def _gauge(name: str, text: str, samples: _Samples) -> Metric:
    return Metric(f"updraft_gateway_{name}", "gauge", text, samples=samples)
