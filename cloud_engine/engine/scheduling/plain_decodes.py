"""Plain decodes: requests that get exactly one token per step and need no scheduling decision, the most common case.

With 256 sequences, a step can afford half a microsecond of Python per sequence. Work is therefore deferred, or done for
all sequences at once.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from ..kv.kv_cache_manager import KVCacheManager
from ..step import StepResult
from ..types.outputs import DecodedTokens
from ..types.request_state import RequestState, ScheduledRequest

#: Register full KV blocks with the prefix cache this many at a time; hashing several costs little more than one.
BLOCKS_AT_ONCE = 4
_item_order = attrgetter("state.order")
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
        self._items: list[ScheduledRequest] = []  # in the order of running requests
        self._columns: _Columns | None = None  # of `_items`; None if stale
        # The plain decodes of each planned step whose result is unread, and the requests dropped since the plan.
        self._unread: deque[tuple[_Columns, set[RequestState]]] = deque()
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
        insort(self._items, state.decode, key=_item_order)
        self._columns = None
        self._expect_plan(state.decode)
        self._expect_result(state.decode, least=pending)
        return True

    def leave(self, state: RequestState) -> None:
        """Remove a request whose next step is not a plain decode; do nothing if it was not added."""
        if state.decode is not None:
            self._items.remove(state.decode)
            self._columns = None
            state.decode = None

    def drop(self, state: RequestState) -> None:
        """Remove a request that stops running. Its part of the unread results will be ignored."""
        self.leave(state)
        for _, dropped in self._unread:
            dropped.add(state)

    @property
    def dropped(self) -> Set[RequestState]:
        """The requests dropped since the last plan, until its result is taken; kept up to date."""
        return self._unread[-1][1]

    def begin(self) -> list[int]:
        """Advance all plain decodes for the next plan. Returns their slots, in the order of `items`."""
        columns = self._columns = self._columns or _Columns.of(self._items)
        for state in columns.states:
            state.num_computed_tokens += 1
        self._unread.append((columns, set()))
        for item in self._due_plans.pop(self._num_plans, ()):
            if item.state.decode is item:
                if item.state.num_computed_tokens == item.state.last_position:
                    self.leave(item.state)  # this step computes its last token
                else:
                    self._full.append(item)
        self._num_plans += 1
        return columns.slots

    def items(self) -> list[ScheduledRequest]:
        """Return all plain decodes, in the order of running requests."""
        return self._items.copy()

    def other_requests(self, running: Sequence[RequestState]) -> list[RequestState]:
        """Return the requests that are not plain decodes, in the order of `running`."""
        return [state for state in running if state.decode is None]

    def take_full(self) -> list[RequestState]:
        """Return and clear the requests that need a block for the next step. Call `grown` or `leave` for each."""
        full, self._full = self._full, []
        return [item.state for item in full if item.state.decode is item]

    def take(self, batch: Sequence[ScheduledRequest], result: StepResult) -> tuple[DecodedTokens, NewTokens, int]:
        """Append to each plain decode of the earliest unread step its new token, unless the token ends the answer.

        `batch` has the plain decodes first, as returned by `items`. Returns the appended tokens, the scheduled
        requests that are left to process, which include the plain decodes that end, and the number of computed rows of
        dropped requests."""
        columns, dropped = self._unread.popleft()
        number = len(columns.states)
        tokens_of = result.tokens[:number]
        left, counts = iter(result.tokens[number:]), result.counts[number:]
        remaining = [(item, list(islice(left, count))) for item, count in zip(batch[number:], counts, strict=True)]
        due = {item for item in self._due_results.pop(self._num_taken, ()) if item.state not in dropped}
        self._num_taken += 1
        places = {item: at for at, item in enumerate(batch[:number]) if item in due} if due else {}
        ends = columns.ends(tokens_of, places)
        num_vain = 0
        if dropped:
            num_vain = sum(item.num_tokens + item.num_planned_drafts for item in batch if item.state in dropped)
            remaining = [(item, tokens) for item, tokens in remaining if item.state not in dropped]
            ends = [at for at in ends if columns.states[at] not in dropped]
        remaining = [(batch[at], [tokens_of[at]]) for at in ends] + remaining
        if dropped or ends:
            skipped = {*ends, *(at for at, state in enumerate(columns.states) if state in dropped)}
            kept = [at for at in range(number) if at not in skipped]
            columns, tokens_of = _Columns.of([batch[at] for at in kept]), [tokens_of[at] for at in kept]
        for state, token in zip(columns.states, tokens_of, strict=True):
            state.token_ids.append(token)
        for item, at in places.items():
            if at not in ends:
                self._expect_result(item)
        return DecodedTokens(columns.request_ids, columns.indices, tokens_of), remaining, num_vain

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


@dataclass(frozen=True, slots=True)
class _Columns:
    """Plain decodes as parallel lists, with one entry per request, which never change."""

    states: list[RequestState]
    request_ids: list[str]
    indices: list[int]
    slots: list[int]
    # Tokens that end any of the answers.
    end_ids: frozenset[int]

    @classmethod
    def of(cls, items: Sequence[ScheduledRequest]) -> _Columns:
        states = [item.state for item in items]
        return cls(
            states,
            [state.request_id for state in states],
            [state.index for state in states],
            [state.slot for state in states],
            frozenset[int]().union(*{state.end_ids for state in states}),
        )

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
