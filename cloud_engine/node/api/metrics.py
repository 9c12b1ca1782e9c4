"""`/metrics` of a node: every figure with the words that say what it is."""

from __future__ import annotations

from ....protocol.http.prometheus import Histogram, Metric
from ...engine.stats import EngineStats
from ..answers.latency import Latencies

_GAUGES = {
    "running": "requests in the batch, now",
    "waiting": "requests in the queue, now",
    "kv_blocks_used": "blocks of the KV cache that requests hold, now",
    "kv_slots_allocated": "token slots in the blocks of running requests, now",
    "kv_slots_wasted": "of these, slots that hold nothing yet",
    "seconds_since_step": "since an engine with work last reported, else 0",
}
_COUNTERS = {
    "steps": "passes through the model",
    "prompt_tokens": "prompt tokens of requests that have begun",
    "generated_tokens": "tokens that came out of the model",
    "finished_requests": "requests whose last answer came to its end, embeddings included",
    "aborted_requests": "requests whose last answer was given up: a client left, a stop string was met, a step failed",
    "preemptions": "running requests sent back to the queue for want of blocks or priority",
    "prefix_query_tokens": "prompt tokens looked up in the prefix cache",
    "prefix_hit_tokens": "of these, tokens that were found",
    "accepted_prediction_tokens": "tokens of requests' predictions that the model confirmed",
    "rejected_prediction_tokens": "tokens of requests' predictions that it did not",
    "speculative_steps": "of all steps, those that verified a draft of any kind",
    "draft_proposed": "tokens that the draft model proposed",
    "draft_accepted": "of these, tokens that the model confirmed",
    "ngram_proposed": "tokens that were proposed because they followed the same text before",
    "ngram_accepted": "of these, tokens that the model confirmed",
    "restarts": "engine processes started in place of one that died",
}


def node_metrics(stats: EngineStats, latencies: Latencies, *, healthy: bool) -> list[Metric | Histogram]:
    return [
        Metric("updraft_engine_healthy", "gauge", "1 while serving", healthy),
        Metric("updraft_engine_kv_blocks", "gauge", "blocks of the KV cache", stats.kv_blocks_total),
        *(Metric(f"updraft_engine_{name}", "gauge", text, getattr(stats, name)) for name, text in _GAUGES.items()),
        *(
            Metric(f"updraft_engine_{name}_total", "counter", text, getattr(stats, name))
            for name, text in _COUNTERS.items()
        ),
        *_shares(stats),
        Metric(
            "updraft_answers_total",
            "counter",
            "complete answers by what ended them",
            samples={(("finish_reason", reason),): count for reason, count in sorted(latencies.finished.items())},
        ),
        Histogram("updraft_ttft_seconds", "from request to first token", latencies.ttft),
        Histogram("updraft_tpot_seconds", "per token after the first, of one answer", latencies.tpot),
        Histogram("updraft_e2e_seconds", "from request to last token", latencies.e2e),
        Histogram("updraft_engine_queue_seconds", "from arrival to the first step", stats.queue_seconds),
        Histogram("updraft_engine_step_seconds", "one pass through the model and its bookkeeping", stats.step_seconds),
    ]


def _shares(stats: EngineStats) -> list[Metric]:
    """Ready-made quotients, 0 where there is nothing to divide. The last three are since the start."""
    prediction_tokens = stats.accepted_prediction_tokens + stats.rejected_prediction_tokens
    shares = {
        "kv_usage_ratio": ("blocks used, of all", stats.kv_blocks_used, stats.kv_blocks_total),
        "kv_waste_ratio": ("slots wasted, of those allocated", stats.kv_slots_wasted, stats.kv_slots_allocated),
        "prefix_hit_ratio": ("prompt tokens found in the cache", stats.prefix_hit_tokens, stats.prefix_query_tokens),
        "prediction_acceptance_ratio": ("prediction confirmed", stats.accepted_prediction_tokens, prediction_tokens),
        "draft_acceptance_ratio": ("drafts confirmed", stats.draft_accepted, stats.draft_proposed),
    }
    return [
        Metric(f"updraft_engine_{name}", "gauge", text, part / whole if whole else 0.0)
        for name, (text, part, whole) in shares.items()
    ]
