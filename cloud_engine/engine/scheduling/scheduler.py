"""The scheduler: the requests of the next step, and their tokens.

There is no prefill phase and no decode phase. Each request has known tokens and computed tokens, and every step spends
a token budget on catching up: a decode is a request that is one token behind, a prefill one that is many behind, a
chunked prefill one that cannot catch up within one step, and a draft is some tokens that are not known yet.

No torch here: the whole policy can be tested on integers.
"""

from __future__ import annotations

import time
from bisect import insort, insort_left
from collections.abc import Iterable, Sequence
from itertools import chain, takewhile

from ....protocol.errors import OverloadedError
from ..config import EngineConfig, Policy
from ..kv.kv_cache_manager import KVCacheManager
from ..stats import EngineStats
from ..types.request import GenerationRequest
from ..types.request_state import RequestState, ScheduledRequest
from .draft_planner import DraftPlanner
from .plain_decodes import PlainDecodes
from .step_budget import StepBudget

#: What a level of priority, and a token of a prompt, are worth in seconds of waiting.
PRIORITY_S, PREFILL_TOKEN_S = 10.0, 0.01


def order_of(state: RequestState, policy: Policy) -> float:
    """A request's place among all others, lowest first; it never changes.

    Under every policy waiting counts, so that nobody starves: a request that came later may go first only if it came
    soon enough after. That is the same as ageing the waiting ones, without ever sorting them again.
    """
    if policy == "priority":
        return state.arrived + PRIORITY_S * state.request.priority
    if policy == "shortest-prefill":
        return state.arrived + PREFILL_TOKEN_S * len(state.request.prompt_ids)
    return state.arrived


class Scheduler:
    """Serves requests in their order (`order_of`), with preemption by recompute.

    Cannot deadlock: only requests that fit the pool alone are let in (`fits`), running requests take blocks in their
    order, and one that lacks a block takes it from the last, in the last resort itself. So the first request always
    moves. Beams of one request run or wait together, so that none holds blocks while it waits for another.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCacheManager,
        speculator: DraftPlanner,
        counters: EngineStats | None = None,
    ) -> None:
        """`counters`: where to count who is let in and who is preempted."""
        self._config = config
        self._cache = cache
        self._speculator = speculator
        self._step_budget = StepBudget(config.max_step_ms and config.max_step_ms / 1e3, config.max_batch_size)
        self._prompt_tokens = 0  # of the last step
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []
        self._places = 0  # in the batch: of the running, and of all that is still to branch off from them
        self.decodes = PlainDecodes(cache)  # those of them that are
        self.counters = counters or EngineStats()

    def fits(self, num_tokens: int, num_beams: int = 1) -> bool:
        """Whether a request of this many tokens, prompt and output together, can ever be served by the pool.

        Beams go on together or not at all, and after a preemption they may share nothing: each needs its own blocks.
        """
        return num_beams * self._cache.most_blocks_for(num_tokens) <= self._cache.pool.num_blocks

    def longest(self, most: int, num_beams: int = 1) -> int:
        """The most tokens that fit (`fits`), up to `most`."""
        if self.fits(most, num_beams):
            return most
        return self._cache.pool.num_blocks // num_beams * self._cache.block_size

    def check_room(self, expected: Sequence[GenerationRequest] = ()) -> None:
        """Raises OverloadedError when the queue is full, `expected` requests that are still to come included.

        Those do not count for whom batch and pool have room: nothing keeps them but that a step has to come first.
        """
        most, queued = self._config.max_waiting, len(self.waiting) + len(expected)
        if queued >= most and queued - self._num_with_room(expected) >= most:
            raise OverloadedError(f"The queue is full ({most} requests waiting): try again later.")

    def add(self, state: RequestState) -> None:
        """Queue a request, for which there is room (`check_room`)."""
        state.order = order_of(state, self._config.policy)
        insort(self.waiting, state, key=_order)

    def schedule(self) -> list[ScheduledRequest]:
        """The next step: running requests first, then new ones, then drafts with whatever budget is left.

        In the batch the plain decodes come first.
        """
        self._cache.release_out_of_reach(self.running)
        if self._config.policy == "priority":
            self._yield_to_priority()
        self._admit_ahead()
        preemptions = self.counters.preemptions
        budget = self._config.token_budget - len(self.running)
        for_prompts = self._step_budget.max_prompt_tokens(budget)
        decodes, others, left = self._continue_running(for_prompts)
        if self.counters.preemptions == preemptions:
            left = self._admit_waiting(others, left)
        self._prompt_tokens = for_prompts - left
        # Drafts use budget, time and blocks nobody else wants: they never delay or preempt a request.
        for_drafts = self._step_budget.max_draft_tokens(budget - self._prompt_tokens, self._prompt_tokens)
        for item in self._speculator.grant(decodes, others, for_drafts, self._cache.grow):
            self.decodes.leave(item.state)
        return [*decodes, *others]

    def ahead(self, batch: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
        """Of a batch of plain decodes that has not been read yet: who will go on in the step behind it, each with a
        block for its token. Empty where there is to be more in that step than these: somebody who waits for the place
        of one that ends, or drafts.
        """
        going_on = [item for item in batch if item.start + 1 < item.state.last_position]
        makes_room = bool(self.waiting) and len(going_on) < len(batch)
        if makes_room or self._speculator.may_draft(len(going_on)):
            return []
        room = (self._cache.grow(item.state, item.start + 2) for item in going_on)
        return going_on if all(room) else []

    @property
    def reads_prompts(self) -> bool:
        """Whether the next step may have prompts in it, and so take much longer than one that only decodes."""
        others = self.decodes.others(self.running)
        has_place = self._places < self._config.max_batch_size
        return bool(self.waiting and has_place) or any(state.num_uncomputed_tokens > 1 for state in others)

    def observe(self, sequences: int, step_s: float) -> None:
        """The step that was scheduled last is over; `sequences` were in it."""
        self._step_budget.observe(self._prompt_tokens, self._speculator.draft_tokens, sequences, step_s)

    def remove(self, state: RequestState) -> None:
        """Forget a finished or aborted request, wherever it is, and free its blocks."""
        if state in self.running:
            self._stop(state)
        else:
            self.waiting.remove(state)

    def fork(self, parent: RequestState, child: RequestState) -> None:
        """Let `child` run beside `parent`, whose blocks it shares.

        `_admit` has kept a place for it, or the caller removes another beam for it.
        """
        child.order = parent.order
        if parent.unforked:
            parent.unforked -= 1
            self._places -= 1
        self._cache.fork(parent, child)
        self._run(child)

    def requests(self) -> list[RequestState]:
        return list(chain(self.running, self.waiting))

    def _continue_running(self, budget: int) -> tuple[list[ScheduledRequest], list[ScheduledRequest], int]:
        """The shares of the running requests: plain decodes, and others. And what they leave of `budget`, in which a
        token for each is left out. Blocks are taken in their order.
        """
        plain, others = self.decodes.shares(self.running)
        preemptions = self.counters.preemptions
        batch: list[ScheduledRequest] = []
        for state in sorted([*others, *self.decodes.take_full()], key=_order):
            num_tokens = min(len(state.token_ids) - state.num_computed_tokens, 1 + budget)
            if not state.block_table or not self._make_room(state, num_tokens):
                continue  # it had to go, for an earlier one or as the last of all
            if state.decode is not None:
                self.decodes.has_room(state.decode)
            else:
                batch.append(ScheduledRequest(state, num_tokens))
                budget -= num_tokens - 1
        if self.counters.preemptions != preemptions:
            plain, _ = self.decodes.shares(self.running)
            batch = [item for item in batch if item.state.block_table]  # others went with a beam behind them
        return plain, batch, budget

    def _make_room(self, state: RequestState, num_tokens: int) -> bool:
        """Blocks for the next `num_tokens`, at the cost of later arrivals. False: the request itself had to go."""
        while not self._cache.grow(state, state.num_computed_tokens + num_tokens):
            if state in self._preempt_last():
                return False
        return True

    def _yield_to_priority(self) -> None:
        """Stop running requests for a waiting one of higher priority that has no room beside them.

        Only if there is room without them, and time in this step: else they would have lost their places for nobody.
        """
        if not self.waiting:
            return
        head = self.waiting[0]
        lesser = list(takewhile(lambda state: _yields(state, head), reversed(self.running)))
        if not lesser or self._has_room_without([]) or not self._has_room_without(lesser):
            return
        missing = sum(_missing(state) for state in self.running if state.order < head.order)
        if missing >= self._step_budget.max_prompt_tokens(self._config.token_budget - len(self.running)):
            return
        while self.running and _yields(self.running[-1], head) and not self._has_room_without([]):
            self._preempt_last()

    def _has_room_without(self, others: list[RequestState]) -> bool:
        """Whether the first of the waiting would have places and blocks if the `others` were not running."""
        states = self._first_waiting()
        return self._has_place(states, others) and self._cache.can_admit(states, others)

    def _admit_ahead(self) -> None:
        """Let in who comes before some running request, so that these do not use up the step's budget first."""
        while self.waiting and self.running and self.waiting[0].order < self.running[-1].order:
            if not self._admit(self._first_waiting()):
                return

    def _first_waiting(self) -> list[RequestState]:
        """The first of the waiting requests, with all its beams."""
        return _beams_of(self.waiting[0], self.waiting)

    def _admit(self, states: list[RequestState]) -> bool:
        """Make the first of the waiting requests a running one, if there is a place and there are blocks for it."""
        if not self._has_place(states):
            return False
        for index, state in enumerate(states):
            if not self._cache.admit(state):
                for admitted in states[:index]:
                    self._cache.free(admitted)
                return False
        for state in states:
            self.waiting.remove(state)
            self._run(state)
            if state.num_preemptions == 0:
                state.num_cached_tokens = state.num_computed_tokens
                self._count(state)
        return True

    def _count(self, state: RequestState) -> None:
        """A request begins."""
        counters = self.counters
        counters.queue_seconds.observe(time.monotonic() - state.arrived)
        counters.prompt_tokens += state.num_prompt_tokens
        if self._config.prefix_caching and state.request.uses_prefix_cache:
            counters.prefix_query_tokens += state.num_prompt_tokens
            counters.prefix_hit_tokens += state.num_cached_tokens

    def _preempt_last(self) -> list[RequestState]:
        """Send the last of the running requests back to its place in the queue, its blocks to the pool."""
        victims = _beams_of(self.running[-1], self.running)
        for victim in reversed(victims):
            self._stop(victim)
            victim.num_preemptions += 1
            insort_left(self.waiting, victim, key=_order)
        self.counters.preemptions += 1
        return victims

    def _run(self, state: RequestState) -> None:
        insort(self.running, state, key=_order)
        self._places += 1 + state.unforked
        self.decodes.running_changed()

    def _stop(self, state: RequestState) -> None:
        self.running.remove(state)
        self._places -= 1 + state.unforked
        self._cache.register(state)  # a plain decode may have full blocks that are not
        self._cache.free(state)
        self.decodes.leave(state)
        self.decodes.running_changed()

    def _admit_waiting(self, batch: list[ScheduledRequest], budget: int) -> int:
        """Add new requests as far as the budget goes. Returns what they leave of it."""
        while self.waiting and budget > 0:
            states = self._first_waiting()
            if len(states) > budget or not self._admit(states):
                break
            for behind, state in zip(reversed(range(len(states))), states, strict=True):
                num_tokens = min(len(state.token_ids) - state.num_computed_tokens, budget - behind)
                batch.append(ScheduledRequest(state, num_tokens))
                budget -= num_tokens
        return budget

    def _num_with_room(self, expected: Sequence[GenerationRequest]) -> int:
        """The number in the queue with places and blocks, the first of them first, as if nothing was cached."""
        places, blocks = self._config.max_batch_size - self._places, self._cache.pool.num_free
        queue = chain(
            ((1 + state.unforked, len(state.token_ids)) for state in self.waiting),
            ((request.num_branches, len(request.prompt_ids)) for request in expected),
        )
        for count, (branches, num_tokens) in enumerate(queue):
            places -= branches
            blocks -= self._cache.most_blocks_for(num_tokens)
            if places < 0 or blocks < 0:
                return count
        return len(self.waiting) + len(expected)

    def _has_place(self, states: list[RequestState], without: Sequence[RequestState] = ()) -> bool:
        """Whether the batch has rows for them, and for all that is still to branch off from them and the running."""
        return self._places - _places(without) + _places(states) <= self._config.max_batch_size


def _beams_of(state: RequestState, among: list[RequestState]) -> list[RequestState]:
    """All beams of this one's request; itself alone where there is no beam search."""
    return [other for other in among if other.request is state.request] if state.request.beam else [state]


def _places(states: Iterable[RequestState]) -> int:
    """Rows that they take in the batch, with all that is still to branch off from them."""
    return sum(1 + state.unforked for state in states)


def _yields(running: RequestState, head: RequestState) -> bool:
    """Whether it gives way to the `head` of the queue."""
    return head.request.priority < running.request.priority and head.order < running.order


def _missing(running: RequestState) -> int:
    """Tokens that are known and not computed, but for the last one, which each step computes."""
    return 0 if running.decode is not None else len(running.token_ids) - running.num_computed_tokens - 1


def _order(state: RequestState) -> float:
    return state.order
