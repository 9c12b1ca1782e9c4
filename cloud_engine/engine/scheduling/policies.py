"""Scheduling policies: the order in which an engine serves its requests.

A policy gives each request a sort key when it is queued; the lowest key is served first. Keys never change, so the
queue is never sorted again. Every key grows with the clock, so that a request can only be overtaken by requests that
arrive within a bounded time after it: no request starves.

Imports no torch and reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from ..config import SchedulingPolicy
from ..types.request_state import RequestState

#: Seconds of waiting that weigh as much as one priority level, or as one prompt token with "shortest-prefill".
PRIORITY_S, PREFILL_TOKEN_S = 10.0, 0.01
#: Tokens of each tenant of weight 1 that "fair" forgets per second.
FORGIVEN_TOKENS_PER_S = 100.0
_MIN_TENANTS = 1024  # tenants that "fair" remembers before it drops those without excess use


class OrderPolicy(Protocol):
    def order(self, state: RequestState, served: float, /) -> float:
        """Return the sort key of a request that is queued now. `served`: the highest key of a request that has run."""
        ...


class FirstComeFirstServed:
    def order(self, state: RequestState, _served: float, /) -> float:
        return state.arrived


class PriorityFirst:
    """Requests with lower `priority` values first. One level outweighs `PRIORITY_S` seconds of waiting."""

    def order(self, state: RequestState, _served: float, /) -> float:
        return state.arrived + PRIORITY_S * state.request.priority


class ShortestPrefillFirst:
    """Short prompts first. One token outweighs `PREFILL_TOKEN_S` seconds of waiting."""

    def order(self, state: RequestState, _served: float, /) -> float:
        return state.arrived + PREFILL_TOKEN_S * state.num_prompt_tokens


class FairShares:
    """Tenants get tokens in proportion to their weights (start-time fair queueing).

    A key is a number of tokens per weight. Each request moves its tenant's next key ahead by the tokens it may use,
    prompt and `max_tokens`. A tenant without recent requests continues at the key that is served now, so nobody saves
    up, and nobody pays for use while others were idle.
    """

    def __init__(self) -> None:
        self._now = self._arrived = 0.0
        self._next_keys: dict[str, float] = {}
        self._most_tenants = _MIN_TENANTS

    def order(self, state: RequestState, served: float, /) -> float:
        request = state.request
        passed_s = max(0.0, state.arrived - self._arrived)
        self._now = max(served, self._now + FORGIVEN_TOKENS_PER_S * passed_s)
        self._arrived += passed_s
        key = max(self._now, self._next_keys.get(request.tenant, 0.0))
        self._next_keys[request.tenant] = key + (state.num_prompt_tokens + state.max_tokens) / request.weight
        if len(self._next_keys) > self._most_tenants:
            self._next_keys = {tenant: next_key for tenant, next_key in self._next_keys.items() if next_key > self._now}
            self._most_tenants = max(_MIN_TENANTS, 2 * len(self._next_keys))
        return key


#: The policies by the names that `EngineConfig.scheduling_policy` has for them.
POLICIES: Mapping[SchedulingPolicy, Callable[[], OrderPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityFirst,
    "shortest-prefill": ShortestPrefillFirst,
    "fair": FairShares,
}


def may_be_preempted(running: RequestState, head: RequestState) -> bool:
    """Return whether a running request may be preempted for the `head` of the queue."""
    return head.request.priority < running.request.priority and head.order < running.order
