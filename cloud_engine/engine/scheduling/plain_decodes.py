"""Plain decodes: requests that get exactly one token per step and need no scheduling decision, the most common case.

With 256 sequences, a step can afford half a microsecond of Python per sequence. Work is therefore deferred, or done for
all sequences at once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter

from ..kv.kv_cache_manager import KVCacheManager
from ..step import StepResult
from ..types.outputs import DecodedTokens
from ..types.request_state import RequestState, ScheduledRequest

#: Register full KV blocks with the prefix cache this many at a time; hashing several costs little more than one.
BLOCKS_AT_ONCE = 4
_order = attrgetter("order")
#: Scheduled requests, each with its new tokens.
NewTokens = list[tuple[ScheduledRequest, list[int]]]


class PlainDecodes:
    """The running requests that get one token in every step, from `join` until `leave`.

    The `ScheduledRequest` of a plain decode is created once and reused (`RequestState.decode`). Most checks are due
    only in steps that are known in advance: when a request's blocks are full, its answer reaches the maximum length, or
    its answer is checked for repetition. In all other steps, the new token is only compared with the end tokens.

    Also tracks which answers have been dropped since the plans whose results are unread (`begin`, `take`).
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._columns = _Columns()
        self._other_requests: list[RequestState] | None = None  # all other running requests; None if stale
        self._unread: deque[_Decodes] = deque()  # the plain decodes of each planned step whose result is unread
        self._num_plans = self._num_taken = 0
        # Requests to check at a plan or at a result, by its number. These lists may contain requests that have left.
        self._due_plans: dict[int, list[ScheduledRequest]] = {}
        self._due_results: dict[int, list[ScheduledRequest]] = {}
        self._full: list[ScheduledRequest] = []  # requests that need a block for the next step; may have left too

    def join(self, state: RequestState) -> bool:
        """Add a running request that has blocks for one more token, if it needs only plain decodes from now on.

        Return whether it is a plain decode."""
        if state.decode is not None:
            return True
        request, pending = state.request, state.num_pending_tokens
        if state.slot < 0 or pending > 1 or state.num_uncomputed_tokens > 1 or not (pending or state.has_begun):
            return False
        if state.grammar is not None or request.params.logprobs is not None or request.draft_ids:
            return False
        state.decode = ScheduledRequest(state, 1)
        self._columns.insert(state.decode)
        self._other_requests = None
        self._expect_plan(state.decode)
        self._expect_result(state.decode, least=pending)
        return True

    def leave(self, state: RequestState) -> None:
        """Remove a request whose next step is not a plain decode; do nothing if it was not added."""
        if state.decode is not None:
            self._columns.remove(state.decode)
            self._other_requests = None
            state.decode = None

    def drop(self, state: RequestState) -> None:
        """Remove a request that stops running. Its part of the unread results will be ignored."""
        self.leave(state)
        for columns in self._unread:
            columns.dropped.add(state)

    @property
    def dropped(self) -> Set[RequestState]:
        """The requests dropped since the last plan, until its result is taken; kept up to date."""
        return self._unread[-1].dropped

    def begin(self) -> list[int]:
        """Advance all plain decodes for the next plan. Returns their slots, in the order of `items`."""
        for state in self._columns.states:
            state.num_computed_tokens += 1
        planned = self._columns.planned()
        self._unread.append(planned)
        for item in self._due_plans.pop(self._num_plans, ()):
            if item.state.decode is item:
                if item.state.num_computed_tokens == item.state.last_position:
                    self.leave(item.state)  # this step computes its last token
                else:
                    self._full.append(item)
        self._num_plans += 1
        return planned.slots

    def running_changed(self) -> None:
        """Mark the list of other requests as stale, because requests have started or stopped running."""
        self._other_requests = None

    def items(self) -> list[ScheduledRequest]:
        """Return all plain decodes, in the order of running requests."""
        return self._columns.items.copy()

    def other_requests(self, running: Sequence[RequestState]) -> list[RequestState]:
        """Return the requests that are not plain decodes, in the order of `running`."""
        if self._other_requests is None:
            self._other_requests = [state for state in running if state.decode is None]
        return self._other_requests

    def take_full(self) -> list[RequestState]:
        """Return and clear the requests that need a block for the next step. Call `grown` or `leave` for each."""
        full, self._full = self._full, []
        return [item.state for item in full if item.state.decode is item]

    def take(self, batch: Sequence[ScheduledRequest], result: StepResult) -> tuple[DecodedTokens, NewTokens, int]:
        """Append to each plain decode of the earliest unread step its new token, unless the token ends the answer.

        `batch` has the plain decodes first, as returned by `items`. Returns the appended tokens, the scheduled
        requests that are left to process, which include the plain decodes that end, and the number of computed rows of
        dropped requests."""
        columns = self._unread.popleft()
        number, dropped = len(columns.items), columns.dropped
        tokens_of = result.tokens[:number]
        remaining = _with_tokens(batch[number:], result.counts[number:], result.tokens[number:])
        places = {
            item: place
            for item in self._due_results.pop(self._num_taken, ())
            if item.state not in dropped and (place := columns.place(item)) is not None
        }
        self._num_taken += 1
        states, request_ids, indices = columns.states, columns.request_ids, columns.indices
        ends = columns.ends(tokens_of, places)
        skipped, num_vain = ends, 0
        if dropped:
            num_vain = sum(item.num_tokens + item.num_planned_drafts for item in batch if item.state in dropped)
            remaining = [(item, tokens) for item, tokens in remaining if item.state not in dropped]
            ends = [at for at in ends if states[at] not in dropped]
            skipped = sorted({*ends, *(at for at, state in enumerate(states) if state in dropped)})
        if skipped:
            remaining = [(columns.items[at], [tokens_of[at]]) for at in ends] + remaining
            for at in reversed(skipped):
                del states[at], request_ids[at], indices[at], tokens_of[at]
        for state, token in zip(states, tokens_of, strict=True):
            state.token_ids.append(token)
        ended = {columns.items[at] for at in ends}
        for item in places:
            if item not in ended:
                self._expect_result(item)
        return DecodedTokens(request_ids, indices, tokens_of), remaining, num_vain

    def grown(self, state: RequestState) -> None:
        """Note that a request of `take_full` has got a block."""
        if state.decode is not None:
            if len(state.block_table) % BLOCKS_AT_ONCE == 1:
                self._cache.register(state)
            self._expect_plan(state.decode)

    def _expect_plan(self, item: ScheduledRequest) -> None:
        """Set the plan after which the request needs a block or gets its last token."""
        state = item.state
        plans = min(state.num_slots, state.last_position) - state.num_computed_tokens - 1
        self._due_plans.setdefault(self._num_plans + plans, []).append(item)

    def _expect_result(self, item: ScheduledRequest, least: int = 0) -> None:
        """Set the result after which the answer is next checked for length and repetition, after `least` others."""
        state = item.state
        results = max(least, min(state.last_position, state.next_check) - len(state.token_ids))
        self._due_results.setdefault(self._num_taken + results, []).append(item)


@dataclass(slots=True, eq=False)
class _Decodes:
    """Plain decodes as parallel lists, with one entry per request, in the order of running requests."""

    items: list[ScheduledRequest] = field(default_factory=list[ScheduledRequest])
    states: list[RequestState] = field(default_factory=list[RequestState])
    request_ids: list[str] = field(default_factory=list[str])
    indices: list[int] = field(default_factory=list[int])
    slots: list[int] = field(default_factory=list[int])
    # Tokens that end any of the answers.
    end_ids: frozenset[int] = frozenset()
    # Requests dropped since the plan.
    dropped: set[RequestState] = field(default_factory=set[RequestState])

    def ends(self, tokens: Sequence[int], due: Mapping[ScheduledRequest, int]) -> list[int]:
        """Return the indices of answers that end with their new token. All answers are checked for end tokens, but only
        answers in `due`, which have their indices, for the maximum length and for repetitions."""
        ended = {
            at
            for item, at in due.items()
            if len(item.state.token_ids) >= item.state.last_position or item.state.until_repetition(tokens[at : at + 1])
        }
        if not self.end_ids.isdisjoint(tokens):
            ended.update(at for at, token in enumerate(tokens) if token in self.states[at].end_ids)
        return sorted(ended)

    def place(self, item: ScheduledRequest) -> int | None:
        """Return the index of `item`, searching the entries with an equal sort key; None if it is not there."""
        order = item.state.order
        start, end = bisect_left(self.states, order, key=_order), bisect_right(self.states, order, key=_order)
        return next((at for at in range(start, end) if self.items[at] is item), None)


class _Columns(_Decodes):
    """The current plain decodes."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds = Counter[frozenset[int]]()  # number of requests by their set of end tokens

    def planned(self) -> _Decodes:
        """Return a copy for the next plan, which later changes do not affect."""
        items, states, request_ids = self.items.copy(), self.states.copy(), self.request_ids.copy()
        return _Decodes(items, states, request_ids, self.indices.copy(), self.slots.copy(), self.end_ids)

    def insert(self, item: ScheduledRequest) -> None:
        state = item.state
        at = bisect_right(self.states, state.order, key=_order)
        self.items.insert(at, item)
        self.states.insert(at, state)
        self.request_ids.insert(at, state.request_id)
        self.indices.insert(at, state.index)
        self.slots.insert(at, state.slot)
        self._kinds[state.end_ids] += 1
        if self._kinds[state.end_ids] == 1:
            self.end_ids |= state.end_ids

    def remove(self, item: ScheduledRequest) -> None:
        at = self.place(item)
        assert at is not None, "only plain decodes leave"
        del self.items[at], self.states[at], self.request_ids[at], self.indices[at], self.slots[at]
        kind = item.state.end_ids
        self._kinds[kind] -= 1
        if not self._kinds[kind]:
            del self._kinds[kind]
            self.end_ids = frozenset[int]().union(*self._kinds)


def _with_tokens(batch: Sequence[ScheduledRequest], counts: Sequence[int], tokens: list[int]) -> NewTokens:
    """Pair each scheduled request with its new tokens, `counts` of `tokens`."""
    taken: NewTokens = []
    start = 0
    for item, count in zip(batch, counts, strict=True):
        taken.append((item, tokens[start : start + count]))
        start += count
    return taken
