"""The scheduler: selects the requests of the next step and their tokens.

There is no prefill phase and no decode phase. Each request has known tokens and computed tokens, and each step spends a
token budget on uncomputed ones. A decode has one uncomputed token, a prefill has many, a chunked prefill has more than
fit into one step, and draft tokens are guesses beyond the known tokens.

Imports no torch, so that all scheduling can be tested on integers.
"""

from __future__ import annotations

import time
from bisect import insort, insort_left
from collections.abc import Callable, Sequence
from itertools import chain, takewhile
from operator import attrgetter
from typing import Protocol

from ....protocol.errors import OverloadedError
from ..config import MAX_DRAFT_TOKENS, EngineConfig
from ..kv.kv_cache_manager import KVCacheManager
from ..stats import EngineStats
from ..step import StepPlan
from ..types.request import GenerationRequest
from ..types.request_state import RequestState, ScheduledRequest
from .growth import AnswerLengths, GrowthForecast
from .plain_decodes import PlainDecodes
from .plan_builder import PlanBuilder
from .policies import POLICIES, may_be_preempted
from .step_budget import StepBudget

_order = attrgetter("order")


class DraftPlanner(Protocol):
    """The scheduler's view of the `Speculator`, which is described there."""

    @property
    def draft_tokens(self) -> int: ...

    def grant(
        self,
        decodes: Sequence[ScheduledRequest],
        other_items: Sequence[ScheduledRequest],
        budget: int,
        grow: Callable[[RequestState, int], bool],
    ) -> list[ScheduledRequest]: ...


class Scheduler:
    """Serves requests in the order of an `OrderPolicy`. A preempted request frees its blocks and is recomputed later.

    The scheduler cannot deadlock, because the first request always advances: every admitted request fits into the pool
    alone (`fits`), running requests get blocks in order, and a request that lacks a block preempts the last request,
    possibly itself.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCacheManager,
        speculator: DraftPlanner,
        counters: EngineStats | None = None,
        fixed_rows: float = 0.0,
    ) -> None:
        """Create a scheduler that counts admissions and preemptions in `counters`.

        `fixed_rows`: number of rows whose computation takes as long as the fixed part of a step."""
        self._config = config
        self._cache = cache
        self._speculator = speculator
        self._policy = POLICIES[config.scheduling_policy]()
        self._served = 0.0  # highest sort key of a request that has run
        self._step_budget = StepBudget(config.max_step_ms and config.max_step_ms / 1e3, config.max_num_seqs)
        self.prompt_tokens = 0  # prompt tokens in the last scheduled step
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []
        self._lengths = AnswerLengths()
        self._forecast: GrowthForecast | None = None  # of `running`, in this step; None until it is needed
        self._refused: RequestState | None = None  # waits for blocks until a running request stops
        self.decodes = PlainDecodes(cache)  # the running requests that only decode
        self._plans = PlanBuilder(cache, config.max_num_seqs)
        self.num_decodes = 0  # plain decodes in the scheduled batch, which begins with them
        self.counters = counters or EngineStats()
        self._fixed_rows = fixed_rows

    def fits(self, num_tokens: int) -> bool:
        """Return whether the pool is large enough for an answer of `num_tokens`, prompt and output together."""
        return self._cache.most_blocks_for(num_tokens) <= self._cache.pool.num_blocks

    def longest(self, most: int) -> int:
        """Return the largest number of tokens, up to `most`, for which `fits` is true."""
        return most if self.fits(most) else self._cache.pool.num_blocks * self._cache.block_size

    def check_capacity(self, expected: Sequence[GenerationRequest] = ()) -> None:
        """Check that the queue, including `expected` requests, is not full. Raises OverloadedError.

        Queued requests that fit into the batch and the pool do not count: they only wait for the next step.
        """
        most, queued = self._config.max_waiting, len(self.waiting) + len(expected)
        if queued >= most and queued - self._num_fitting(expected) >= most:
            raise OverloadedError(f"The queue is full ({most} requests waiting). Retry later.")

    def add(self, state: RequestState) -> None:
        """Queue a request; call `check_capacity` first."""
        state.order = self._policy.order(state, self._served)
        insort(self.waiting, state, key=_order)

    def schedule(self) -> list[ScheduledRequest]:
        """Select the next step's batch: running requests, then new ones, then drafts with the remaining budget.

        In the returned batch, plain decodes come first. Call `plan` for the plan to execute.
        """
        self._cache.release_out_of_reach(self.running)
        if self._config.scheduling_policy == "priority":
            self._yield_to_priority()
        self._admit_ahead()
        preemptions = self.counters.preemptions
        budget = self._config.max_num_batched_tokens - len(self.running)
        for_prompts = self._step_budget.max_prompt_tokens(budget)
        decodes, other_requests, left = self._continue_running(for_prompts)
        if self.counters.preemptions == preemptions:
            left = self._admit_waiting(other_requests, left)
        self._forecast = None
        self.prompt_tokens = for_prompts - left
        # Drafts only get leftover budget, time and blocks, so they never delay or preempt a request.
        for_drafts = self._step_budget.max_draft_tokens(budget - self.prompt_tokens, self.prompt_tokens)
        for_drafts = min(for_drafts, MAX_DRAFT_TOKENS)
        if granted := self._speculator.grant(decodes, other_requests, for_drafts, self._cache.grow):
            drafting = [item for item in granted if item.state.decode is not None]
            for item in drafting:
                self.decodes.leave(item.state)
            other_requests = drafting + other_requests
            decodes = [item for item in decodes if item.state.decode is item]
        self.num_decodes = len(decodes)
        return [*decodes, *other_requests]

    def plan(self, batch: Sequence[ScheduledRequest]) -> StepPlan:
        """Return the plan of a scheduled `batch`, and advance its requests.

        Plans must be executed in the order of their creation. The next step may be scheduled and planned before the
        results of this plan are processed.
        """
        return self._plans.plan(self.decodes.begin(), batch[self.num_decodes :])

    @property
    def reads_prompts(self) -> bool:
        """Return whether the next step may contain prompt tokens, and so take much longer than a decode step."""
        if self.waiting and self._has_place():
            return True
        return any(state.num_uncomputed_tokens > 1 for state in self.decodes.other_requests(self.running))

    def observe(self, sequences: int, step_s: float, tokens: tuple[int, int] | None = None) -> None:
        """Learn from a step that had `sequences` and took `step_s` seconds.

        `tokens`: its numbers of prompt and draft tokens; None for those of the last scheduled step.
        """
        prompt_tokens, draft_tokens = tokens or (self.prompt_tokens, self._speculator.draft_tokens)
        self._step_budget.observe(prompt_tokens, draft_tokens, sequences, step_s)

    def remove(self, state: RequestState) -> None:
        """Remove a finished or aborted request, running or waiting, and free its blocks."""
        if state in self.running:
            self._stop(state)
            self._lengths.add(state)
        else:
            self.waiting.remove(state)

    def requests(self) -> list[RequestState]:
        return list(chain(self.running, self.waiting))

    def _continue_running(self, budget: int) -> tuple[list[ScheduledRequest], list[ScheduledRequest], int]:
        """Schedule the running requests. Return the plain decodes, the other requests and the rest of `budget`.

        `budget` excludes the first token of each running request. Requests get blocks in the order of `running`."""
        other_requests = self.decodes.other_requests(self.running)
        preemptions = self.counters.preemptions
        batch: list[ScheduledRequest] = []
        for state in sorted([*other_requests, *self.decodes.take_full()], key=_order):
            num_tokens = min(state.num_next_tokens, 1 + budget)
            if not state.block_table or state.ends_next or not self._allocate(state, num_tokens):
                continue  # preempted by an earlier request or by itself, or its last token is being computed
            if state.decode is not None:
                self.decodes.grown(state)
            elif not self.decodes.join(state):
                batch.append(ScheduledRequest(state, num_tokens))
                budget -= num_tokens - 1
        if self.counters.preemptions != preemptions:
            batch = [item for item in batch if item.state.block_table]  # answers to one request have equal order
        return self.decodes.items(), batch, budget

    def _allocate(self, state: RequestState, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens`, preempting later requests. Return False if `state` itself was preempted."""
        while not self._cache.grow(state, state.num_computed_tokens + num_tokens):
            if self._preempt_last() is state:
                return False
        return True

    def _yield_to_priority(self) -> None:
        """Preempt running requests for a waiting one of higher priority that does not fit otherwise.

        Does nothing unless that frees enough capacity and this step has budget left for the waiting request.
        """
        if not self.waiting:
            return
        head = self.waiting[0]
        lesser = list(takewhile(lambda state: may_be_preempted(state, head), reversed(self.running)))
        if not lesser or self._fits_without([]) or not self._fits_without(lesser):
            return
        # Uncomputed tokens, except the one that each request computes in every step.
        missing = sum(state.num_uncomputed_tokens - 1 for state in self.running if state.order < head.order)
        if missing >= self._step_budget.max_prompt_tokens(self._config.max_num_batched_tokens - len(self.running)):
            return
        while self.running and may_be_preempted(self.running[-1], head) and not self._fits_without([]):
            self._preempt_last()

    def _fits_without(self, other_requests: list[RequestState]) -> bool:
        """Return whether the first waiting request has places and blocks if the `other_requests` are not running."""
        head = self.waiting[0]
        return self._has_place(other_requests) and self._cache.can_admit(head, other_requests)

    def _admit_ahead(self) -> None:
        """Admit waiting requests that sort before a running one. Call this before running requests spend the budget."""
        while self.waiting and self.running and self.waiting[0].order < self.running[-1].order:
            if not self._admit_first():
                return

    def _admit_first(self) -> bool:
        """Start the first waiting request; return False if the batch has no place or the pool too few blocks for it.

        Blocks for the expected growth of running answers stay free, unless the request may preempt one of them, or
        its own preemption costs less than its waiting."""
        state = self.waiting[0]
        if not self._has_place() or state is self._refused:
            return False
        forecast = self._forecast = self._forecast or GrowthForecast(
            self._lengths, self.running, self._cache.block_size
        )
        reserved = 0
        if self.running and not may_be_preempted(self.running[-1], state):
            reserved = self._num_reserved(forecast, state)
        is_risk_repaid = reserved > 0 and forecast.repays_preemption(state, self._cache.pool.num_free, self._fixed_rows)
        if not self._cache.admit(state, 0 if is_risk_repaid else reserved):
            self._refused = state if reserved else None
            return False
        forecast.add([state])
        del self.waiting[0]
        self._served = max(self._served, state.order)
        insort(self.running, state, key=_order)
        if state.num_preemptions == 0 and state.index == 0:  # a request's other answers do not count as prompts
            state.num_cached_tokens = state.num_computed_tokens
            self._count(state)
        return True

    def _num_reserved(self, forecast: GrowthForecast, state: RequestState) -> int:
        """Return how many blocks to keep free if `state` is admitted. With a window, requests hardly grow."""
        return 0 if self._cache.window is not None else forecast.peak_with(state)

    def _count(self, state: RequestState) -> None:
        counters = self.counters
        counters.queue_seconds.observe(time.monotonic() - state.arrived)
        counters.prompt_tokens += state.num_prompt_tokens
        if self._config.enable_prefix_caching and state.request.uses_prefix_cache:
            counters.prefix_query_tokens += state.num_prompt_tokens
            counters.prefix_hit_tokens += state.num_cached_tokens

    def _preempt_last(self) -> RequestState:
        """Preempt the last running request: free its blocks and return it to its place in the queue."""
        victim = self.running[-1]
        self._stop(victim)
        victim.num_preemptions += 1
        insort_left(self.waiting, victim, key=_order)
        self.counters.preemptions += 1
        return victim

    def _stop(self, state: RequestState) -> None:
        self._forecast = self._refused = None
        self.running.remove(state)
        self._cache.register(state)  # a plain decode may have unregistered full blocks
        self._cache.free(state)
        self._plans.end(state)
        self.decodes.drop(state)

    def _admit_waiting(self, batch: list[ScheduledRequest], budget: int) -> int:
        """Admit waiting requests and schedule them in `batch`, within `budget`. Return the rest of the budget."""
        while self.waiting and budget > 0:
            state = self.waiting[0]
            if not self._admit_first():
                break
            num_tokens = min(state.num_next_tokens, budget)
            batch.append(ScheduledRequest(state, num_tokens))
            budget -= num_tokens
        return budget

    def _num_fitting(self, expected: Sequence[GenerationRequest]) -> int:
        """Return how many queued requests, counted from the first, fit into batch and pool if no block is cached."""
        places = self._config.max_num_seqs - sum(map(_num_places, self.running))
        if places <= 0 or (self.waiting and self.waiting[0] is self._refused):
            return 0  # the usual case of a full queue, so no forecast is made
        blocks, reserved = self._cache.pool.num_free, 0
        forecast = GrowthForecast(self._lengths, self.running, self._cache.block_size)
        for count, request in enumerate([*self.waiting, *expected]):
            if isinstance(request, RequestState):
                places -= _num_places(request)
                blocks -= self._cache.most_blocks_for(len(request.token_ids))
                reserved = self._num_reserved(forecast, request)
                forecast.add([request])
            else:
                places -= request.n
                blocks -= self._cache.most_blocks_for(len(request.prompt_ids))
            if places < 0 or blocks < reserved:
                return count
        return len(self.waiting) + len(expected)

    def _has_place(self, without: Sequence[RequestState] = ()) -> bool:
        """Return whether another request fits into the batch, if the requests in `without` left it."""
        return len(self.running) - len(without) < self._config.max_num_seqs


def _num_places(state: RequestState) -> int:
    """Return the number of answers that `state` stands for: all of its request's until the first has begun."""
    return 1 if state.index or state.has_begun else state.request.n
