"""Runs a scheduler's steps without a model."""

from __future__ import annotations

from updraft.cloud_engine.engine.scheduling.scheduler import Scheduler


def run_step(scheduler: Scheduler) -> list[str]:
    """Run a step in which each answer gets one token. Returns the requests of the batch, in order."""
    batch = scheduler.schedule()
    for item in batch:
        caught_up = item.is_caught_up
        item.state.num_computed_tokens += item.num_tokens
        if caught_up:
            item.state.token_ids.append(0)
            if item.state.num_remaining_tokens == 0:
                scheduler.remove(item.state)
    return [item.state.request_id for item in batch]
