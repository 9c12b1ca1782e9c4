"""Counters and gauges of an engine, for `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...protocol.http.prometheus import Distribution

QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(slots=True)
class EngineStats:
    """Gauges of this moment, and counters, which only ever grow (from `steps` on)."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    # Token slots in blocks that are in use.
    kv_slots_allocated: int = 0
    # Of these, slots that hold nothing yet.
    kv_slots_wasted: int = 0
    # How long ago an engine that has work last reported, else 0.
    seconds_since_step: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    # Counted when their last answer leaves.
    finished_requests: int = 0
    aborted_requests: int = 0
    preemptions: int = 0
    # Prompt tokens, counted when their requests begin.
    prefix_query_tokens: int = 0
    # Of these, found in the prefix cache.
    prefix_hit_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    # Steps that verified drafts of any kind.
    speculative_steps: int = 0
    # By the draft model.
    draft_proposed: int = 0
    draft_accepted: int = 0
    # Looked up in the request's own text.
    ngram_proposed: int = 0
    ngram_accepted: int = 0
    # Of the engine's process. The other counters begin anew with each.
    restarts: int = 0
    # From arrival to the first step.
    queue_seconds: Distribution = field(default_factory=lambda: Distribution(QUEUE_SECONDS))
    # How long a step takes.
    step_seconds: Distribution = field(default_factory=lambda: Distribution(STEP_SECONDS))
