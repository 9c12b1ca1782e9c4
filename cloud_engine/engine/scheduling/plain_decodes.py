"""Plain decodes: requests that get exactly one token per step and need no scheduling decision, the most common case.

With 256 sequences, a step can afford half a microsecond of Python per sequence. Work is therefore deferred, or done for
all sequences at once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
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
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._columns = _Columns()
        self._other_requests: list[RequestState] | None = None  # all other running requests; None if stale
        self._steps = 0  # steps taken so far
        self._due: dict[int, list[ScheduledRequest]] = {}  # step -> requests to check after it; may contain stale ones
        self._full: list[ScheduledRequest] = []  # requests that need a block for the next step; entries may be stale

    def join(self, state: RequestState) -> None:
        """Add a running request that has just received a token, if it needs nothing but plain decodes from now on."""
        request = state.request
        if state.grammar is None and request.params.logprobs is None and not request.draft_ids:
            state.decode = ScheduledRequest(state, 1)
            self._columns.insert(state.decode)
            self._other_requests = None
            self.expect(state.decode)

    def leave(self, state: RequestState) -> None:
        """Remove a request whose next step is not a plain decode; do nothing if it was not added."""
        if state.decode is not None:
            self._columns.remove(state.decode)
            self._other_requests = None
            state.decode = None

    @property
    def slots(self) -> list[int]:
        """A copy of the slots of all plain decodes, in the order of `shares`."""
        return self._columns.slots.copy()

    def running_changed(self) -> None:
        """Mark the list of other requests as stale, because requests have started or stopped running."""
        self._other_requests = None

    def shares(self, running: Sequence[RequestState]) -> tuple[list[ScheduledRequest], list[RequestState]]:
        """Return the scheduled plain decodes and, separately, all other requests, in the order of `running`."""
        return self._columns.items.copy(), self.other_requests(running)

    def other_requests(self, running: Sequence[RequestState]) -> list[RequestState]:
        """Return the requests that are not plain decodes, in the order of `running`."""
        if self._other_requests is None:
            self._other_requests = [state for state in running if state.decode is None]
        return self._other_requests

    def take_full(self) -> list[RequestState]:
        """Return and clear the requests that need a block for the next token. Call `expect` or `leave` for each."""
        full, self._full = self._full, []
        return [item.state for item in full if item.state.decode is item]

    def take(self, batch: Sequence[ScheduledRequest], result: StepResult) -> tuple[DecodedTokens, NewTokens]:
        """Append to each plain decode its new token, unless the token ends the answer.

        `batch` has the plain decodes first, as returned by `shares`. Returns the appended tokens, and the scheduled
        requests that are left to process, which include the plain decodes that end."""
        columns, number = self._columns, len(self._columns.items)
        tokens_of = result.tokens[:number]
        remaining = _with_tokens(batch[number:], result.counts[number:], result.tokens[number:])
        due = [item for item in self._due.pop(self._steps, ()) if item.state.decode is item]
        self._steps += 1
        states, request_ids, indices = columns.states, columns.request_ids.copy(), columns.indices.copy()
        if ends := columns.ends(tokens_of, due):
            remaining = [(columns.items[at], [tokens_of[at]]) for at in ends] + remaining
            states = states.copy()
            for at in reversed(ends):
                del states[at], request_ids[at], indices[at], tokens_of[at]
        for state, token in zip(states, tokens_of, strict=True):
            state.token_ids.append(token)
            state.num_computed_tokens += 1
        ended = {columns.items[at] for at in ends}
        for item in due:
            if item not in ended:
                if len(item.state.block_table) % BLOCKS_AT_ONCE == 0:
                    self._cache.register(item.state)
                self.expect(item)
        return DecodedTokens(request_ids, indices, tokens_of), remaining

    def expect(self, item: ScheduledRequest) -> None:
        """Set the step of the next check. Call this after `join`, a check, or the allocation of a new block."""
        state = item.state
        computed = state.num_computed_tokens
        if computed >= state.num_slots:
            self._full.append(item)
        else:
            steps = min(state.num_slots, state.last_position, state.next_check) - computed - 1
            self._due.setdefault(self._steps + max(steps, 0), []).append(item)


class _Columns:
    """The data of plain decodes as parallel lists, with one entry per request, in the order of running requests."""

    def __init__(self) -> None:
        self.items: list[ScheduledRequest] = []
        self.states: list[RequestState] = []
        self.request_ids: list[str] = []
        self.indices: list[int] = []
        self.slots: list[int] = []
        self._kinds = Counter[frozenset[int]]()  # number of requests by their set of end tokens
        self._end_ids = frozenset[int]()

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
            self._end_ids |= state.end_ids

    def remove(self, item: ScheduledRequest) -> None:
        at = self._place(item)
        del self.items[at], self.states[at], self.request_ids[at], self.indices[at], self.slots[at]
        kind = item.state.end_ids
        self._kinds[kind] -= 1
        if not self._kinds[kind]:
            del self._kinds[kind]
            self._end_ids = frozenset[int]().union(*self._kinds)

    def ends(self, tokens: Sequence[int], due: Sequence[ScheduledRequest]) -> list[int]:
        """Return the indices of answers that end with their new token. All answers are checked for end tokens, but only
        answers in `due` for the maximum length and for repetitions."""
        places = {self._place(item): item for item in due}
        ended = {
            at
            for at, item in places.items()
            if item.start + 1 >= item.state.last_position or item.state.until_repetition(tokens[at : at + 1])
        }
        if not self._end_ids.isdisjoint(tokens):
            ended.update(at for at, token in enumerate(tokens) if token in self.states[at].end_ids)
        return sorted(ended)

    def _place(self, item: ScheduledRequest) -> int:
        """Return the index of `item`, searching from the first entry with an equal sort key."""
        return self.items.index(item, bisect_left(self.states, item.state.order, key=_order))


def _with_tokens(batch: Sequence[ScheduledRequest], counts: Sequence[int], tokens: list[int]) -> NewTokens:
    """Pair each scheduled request with its new tokens, `counts` of `tokens`."""
    taken: NewTokens = []
    start = 0
    for item, count in zip(batch, counts, strict=True):
        taken.append((item, tokens[start : start + count]))
        start += count
    return taken
