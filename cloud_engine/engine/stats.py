"""Counters and gauges of an engine, for `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...protocol.http.prometheus import Distribution

QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(slots=True)
class EngineStats:
    """Gauges of the current state. The fields from `steps` on are counters, which only grow."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    # Token slots in the KV blocks in use.
    kv_slots_allocated: int = 0
    # Allocated slots that hold no token yet.
    kv_slots_wasted: int = 0
    # Seconds since the last report of an engine that has work; 0 when idle.
    seconds_since_step: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    # Requests of which all answers have finished.
    finished_requests: int = 0
    aborted_requests: int = 0
    preemptions: int = 0
    # Steps launched before the result of the previous step was read.
    overlapped_steps: int = 0
    # Rows (tokens) computed for requests that ended, were aborted or were preempted before the result was read.
    vain_rows: int = 0
    # Prompt tokens looked up in the prefix cache, counted when a request starts.
    prefix_query_tokens: int = 0
    # Prompt tokens found in the prefix cache.
    prefix_hit_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    # Steps that verified draft tokens of any kind.
    speculative_steps: int = 0
    # Tokens that the draft model proposed.
    draft_proposed: int = 0
    draft_accepted: int = 0
    # Tokens proposed by n-gram lookup in the request's own text.
    ngram_proposed: int = 0
    ngram_accepted: int = 0
    # Restarts of the engine process; each restart resets the other counters.
    restarts: int = 0
    # Seconds from a request's arrival to its first step.
    queue_seconds: Distribution = field(default_factory=lambda: Distribution(QUEUE_SECONDS))
    # Seconds per step.
    step_seconds: Distribution = field(default_factory=lambda: Distribution(STEP_SECONDS))
