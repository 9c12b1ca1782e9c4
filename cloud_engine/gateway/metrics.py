"""`/metrics` of the gateway: every figure with the words that say what it is."""

from __future__ import annotations

from collections.abc import Sequence

from ...protocol.http.prometheus import Metric
from .balancing.nodes import Node
from .relay.counters import Counters


def gateway_metrics(nodes: Sequence[Node], counters: Counters) -> list[Metric]:
    by_status = {(("status", str(status)),): count for status, count in sorted(counters.by_status.items())}
    up = {(("node", node.url),): node.healthy for node in nodes}
    in_flight = {(("node", node.url),): node.in_flight for node in nodes}
    return [
        Metric("updraft_gateway_requests_total", "counter", "requests by final status", samples=by_status),
        Metric("updraft_gateway_node_up", "gauge", "1 if the node takes requests", samples=up),
        Metric("updraft_gateway_node_in_flight", "gauge", "requests on the node, now", samples=in_flight),
        Metric("updraft_gateway_retries_total", "counter", "fail-overs to another node", counters.retries),
        Metric("updraft_gateway_prompt_tokens_total", "counter", "prompt tokens", counters.prompt_tokens),
        Metric("updraft_gateway_completion_tokens_total", "counter", "completion tokens", counters.completion_tokens),
    ]
