"""docs/reference/metrics.md: every metric of node, gateway and router."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...cloud_engine.engine.stats import EngineStats
from ...cloud_engine.gateway.metrics import gateway_metrics
from ...cloud_engine.gateway.relay.counters import Counters
from ...cloud_engine.node.answers.latency import Latencies
from ...cloud_engine.node.api.metrics import node_metrics
from ...protocol.http.prometheus import render
from ...router.feedback.collector import LearningCounts
from .markdown import code, page, table

_INTRODUCTION = """`GET /metrics` answers in Prometheus' text format. Counters count since the start; an engine's
counters restart with every engine process. Ratios are averages since the node's start, except the two of the KV cache,
which are current values. For a ratio over a time window, divide the `rate()` of two counters."""
#: vLLM's names of comparable metrics.
_VLLM = {
    "updraft_engine_running": "vllm:num_requests_running",
    "updraft_engine_waiting": "vllm:num_requests_waiting",
    "updraft_engine_kv_usage_ratio": "vllm:kv_cache_usage_perc",
    "updraft_engine_prompt_tokens_total": "vllm:prompt_tokens_total",
    "updraft_engine_generated_tokens_total": "vllm:generation_tokens_total",
    "updraft_engine_preemptions_total": "vllm:num_preemptions_total",
    "updraft_engine_prefix_query_tokens_total": "vllm:prefix_cache_queries_total",
    "updraft_engine_prefix_hit_tokens_total": "vllm:prefix_cache_hits_total",
    "updraft_engine_draft_proposed_total": "vllm:spec_decode_num_draft_tokens_total",
    "updraft_engine_draft_accepted_total": "vllm:spec_decode_num_accepted_tokens_total",
    "updraft_engine_queue_seconds": "vllm:request_queue_time_seconds",
    "updraft_answers_total": "vllm:request_success_total",
    "updraft_ttft_seconds": "vllm:time_to_first_token_seconds",
    "updraft_tpot_seconds": "vllm:request_time_per_output_token_seconds",
    "updraft_e2e_seconds": "vllm:e2e_request_latency_seconds",
    "updraft_gateway_prompt_tokens_total": "vllm:prompt_tokens_total",
    "updraft_gateway_completion_tokens_total": "vllm:generation_tokens_total",
    "updraft_gateway_cached_tokens_total": "vllm:prefix_cache_hits_total",
    "updraft_gateway_waiting": "vllm:num_requests_waiting",
    "updraft_gateway_node_in_flight": "vllm:num_requests_running",
    "updraft_gateway_ttft_seconds": "vllm:time_to_first_token_seconds",
    "updraft_gateway_tpot_seconds": "vllm:request_time_per_output_token_seconds",
    "updraft_gateway_e2e_seconds": "vllm:e2e_request_latency_seconds",
}


def metrics_page() -> str:
    node = _families(node_metrics(EngineStats(), Latencies(), healthy=True))
    gateway, router = _families(gateway_metrics(Counters())), LearningCounts().metrics()
    if unknown := set(_VLLM) - {name for name, _, _ in (*node, *gateway)}:
        raise ValueError(f"There is no metric {', '.join(sorted(unknown))}: correct the table of vLLM's names.")
    return page(
        "Metrics",
        _INTRODUCTION,
        "## Node",
        _vllm_table(node),
        "## Gateway",
        "Series of single keys (label `key`) need an API key with the scope `usage`. `tier` is the key's priority.",
        _vllm_table(gateway),
        "## Router",
        table(("metric", "type", "meaning"), [(code(name), *rest) for name, *rest in _families(router)]),
    )


def _vllm_table(families: list[tuple[str, str, str]]) -> str:
    rows = [(code(name), kind, text, code(_VLLM.get(name, ""))) for name, kind, text in families]
    return table(("metric", "type", "meaning", "in vLLM"), rows)


def _families(metrics: Iterable[Any]) -> list[tuple[str, str, str]]:
    """Return (name, type, help) of each metric family, parsed from the Prometheus text."""
    lines = [line.split(" ", 3) for line in render(metrics).splitlines() if line.startswith("#")]
    helps = {line[2]: line[3] for line in lines if line[1] == "HELP"}
    return [(line[2], line[3], helps[line[2]]) for line in lines if line[1] == "TYPE"]
