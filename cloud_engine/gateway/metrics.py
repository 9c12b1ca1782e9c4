"""`/metrics` of the gateway: every figure with the words that say what it is, of all workers together."""

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
    "cached_tokens": ("cached", "prompt tokens that nodes had in their caches"),
    "accepted_prediction_tokens": ("accepted", "tokens of predictions that the model confirmed"),
    "rejected_prediction_tokens": ("rejected", "tokens of predictions that it did not"),
    "cost_usd": ("cost", "US dollars, where the model has a price"),
    "slo_streams": ("streams", "streams that came to their end"),
    "slo_streams_met": ("streams_within", "of these, streams within the objective (--slo-ttft-s, --slo-tpot-s)"),
}
_KEY_SUMS = {
    "requests": "requests by key",
    "prompt_tokens": "prompt tokens by key",
    "completion_tokens": "completion tokens by key",
    "cost_usd": "US dollars by key",
}


class WorkerGauges:
    """Writes into the worker's row how its nodes, its waiting line and its ledger are, so that every worker knows."""

    def __init__(self, registry: NodeRegistry, ledger: UsageLedger, row: WorkerRow) -> None:
        self._registry = registry
        self._ledger = ledger
        self._row = row
        #: What a worker counted that this one replaces.
        self._before = {name: list(numbers) for name, numbers in row.items()}

    async def keep_published(self) -> None:
        """Until it is cancelled."""
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
        for priority, count in self._registry.waiting.items():
            self._write(("waiting", priority), (count,))
        ledger = self._ledger
        self._write(("ledger",), (ledger.failing, ledger.waiting), ledger.lost, ledger.failures)

    def _write(self, name: Name, gauges: tuple[float, ...], *counted: float) -> None:
        numbers, before = self._row.of(*name), self._before.get(name)
        for column, value in enumerate((*gauges, *counted)):
            is_counter = column >= len(gauges) and before is not None
            numbers[column] = value + before[column] if is_counter and before else value


def requests_in_flight(rows: SharedRows) -> dict[str, int]:
    """By the node's URL."""
    return {url: int(numbers[2]) for (url,), numbers in rows.sums("node").items()}


def gateway_metrics(counters: Counters, *, with_keys: bool = True) -> list[Metric | Histogram]:
    """`with_keys`: what is of single keys is for who may see the usage."""
    keys = _keys(counters.rows) if with_keys else []
    return [*_requests(counters), *_models(counters), *keys, *_nodes(counters.rows), *_ledger(counters)]


def _requests(counters: Counters) -> list[Metric]:
    rows = counters.rows
    return [
        _counter("requests", "requests by final status", _labelled(rows.sums("status"), "status")),
        _counter("refused", "requests that ended in an error, by its type", _labelled(rows.sums("error"), "type")),
        _counter("limits_hit", "requests refused by a limit, by its kind", _labelled(rows.sums("limit"), "limit")),
        Metric("updraft_gateway_retries_total", "counter", "fail-overs to another node", _first(rows, "retries")),
        _counter("hedges", "requests to a second node too, by its outcome", _labelled(rows.sums("hedge"), "outcome")),
        Metric("updraft_gateway_cache_hits_total", "counter", "answers that were kept or shared", _first(rows, "kept")),
    ]


def _models(counters: Counters) -> list[Metric | Histogram]:
    models = {(("model", name[0]), ("tier", name[1])): sums for name, sums in counters.by_model.items()}
    histograms = (
        ("ttft", "of streams, from request to first token", lambda sums: sums.ttft),
        ("tpot", "of streams, per token after the first", lambda sums: sums.tpot),
        ("e2e", "from request to the end of the answer", lambda sums: sums.e2e),
    )
    return [
        *(
            _counter(name, text, {labels: sums.sum(column) for labels, sums in models.items()})
            for name, (column, text) in _MODEL_SUMS.items()
        ),
        *(
            Histogram(
                f"updraft_gateway_{name}_seconds", text, samples={labels: of(sums) for labels, sums in models.items()}
            )
            for name, text, of in histograms
        ),
    ]


def _keys(rows: SharedRows) -> list[Metric]:
    sums = rows.sums("key")
    return [
        _counter(f"key_{name}", text, _labelled(sums, "key", column))
        for column, (name, text) in enumerate(_KEY_SUMS.items())
    ]


def _nodes(rows: SharedRows) -> list[Metric]:
    """The worst of the workers' views of a node, which differ for moments."""
    named, sums = rows.named("node"), rows.sums("node")

    def of_all(column: int, choose: Callable[[list[float]], float]) -> dict[Name, list[float]]:
        return {name: [choose([numbers[column] for numbers in workers])] for name, workers in named.items()}

    waiting = _labelled(rows.sums("waiting"), "tier")
    return [
        _gauge("node_up", "1 if the node takes requests", _labelled(of_all(0, min), "node")),
        _gauge("node_breaker_state", "0: closed, 1: half-open, 2: open", _labelled(of_all(1, max), "node")),
        _gauge("node_in_flight", "requests on the node, now", _labelled(sums, "node", 2)),
        _counter("node_breaker_trips", "times that a worker took the node out", _labelled(sums, "node", 3)),
        _gauge("waiting", "requests that wait for a node, now", waiting),
    ]


def _ledger(counters: Counters) -> list[Metric]:
    workers = counters.rows.named("ledger").get((), [])
    failing = max((numbers[0] for numbers in workers), default=0)
    waiting, lost, failures = (sum(numbers[column] for numbers in workers) for column in (1, 2, 3))
    return [
        Metric("updraft_gateway_ledger_failing", "gauge", "1 if the ledger cannot be written now", failing),
        Metric("updraft_gateway_ledger_waiting", "gauge", "rows on their way to the ledger, now", waiting),
        Metric("updraft_gateway_ledger_lost_total", "counter", "rows that never came into the ledger", lost),
        Metric("updraft_gateway_ledger_failures_total", "counter", "commits to the ledger that failed", failures),
    ]


def _first(rows: SharedRows, kind: str) -> float:
    return rows.sums(kind).get((), [0.0])[0]


_Samples = Mapping[tuple[tuple[str, str], ...], float]


def _labelled(found: Mapping[Name, list[float]], label: str, column: int = 0) -> _Samples:
    return {((label, name),): numbers[column] for (name,), numbers in sorted(found.items())}


def _counter(name: str, text: str, samples: _Samples) -> Metric:
    return Metric(f"updraft_gateway_{name}_total", "counter", text, samples=samples)


def _gauge(name: str, text: str, samples: _Samples) -> Metric:
    return Metric(f"updraft_gateway_{name}", "gauge", text, samples=samples)
