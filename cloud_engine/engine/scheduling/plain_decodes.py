"""Plain decodes: what most requests do in most steps, namely to get one token, with nothing to decide about it.

At 256 sequences a step has half a microsecond for each, so nothing is done for one of them that can be done for all or
can wait. No torch here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence

from ..kv.kv_cache_manager import KVCacheManager
from ..types.outputs import DecodedTokens
from ..types.request_state import RequestState, ScheduledRequest

#: Full blocks of an answer that others can find together: several are hashed in little more time than one.
BLOCKS_AT_ONCE = 4

#: Shares of a step that are no plain decodes, each with the first of its rows.
Others = list[tuple[ScheduledRequest, int]]


class PlainDecodes:
    """Those of the running requests that get one token in every step, from the time they join until they leave.

    Their shares of a step are made once (`RequestState.decode`). A request is looked at again only when its time has
    come: its blocks will be full, or its answer at its length, in a step that is known beforehand. All other tokens are
    appended unchecked, unless one of them ends an answer.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._columns = _Columns()
        self._others: list[RequestState] | None = None  # who runs beside them; None: it has to be looked up
        self._steps = 0  # taken so far
        self._due: dict[int, list[ScheduledRequest]] = {}  # step -> who is to be looked at behind it; some have left
        self._full: list[ScheduledRequest] = []  # who needs a block before the next step; some have left

    def join(self, state: RequestState) -> None:
        """For a running request that has just got a token: keep its share, if only a plain decode can come of it."""
        request = state.request
        if state.grammar is None and request.params.logprobs is None and not request.draft_ids:
            state.decode = ScheduledRequest(state, 1)
            self._columns.insert(state.decode)
            self._others = None
            self._expect(state.decode)

    def leave(self, state: RequestState) -> None:
        """Something else is to happen to a request that may be one of these."""
        if state.decode is not None:
            self._columns.remove(state.decode)
            self._others = None
            state.decode = None

    def running_changed(self) -> None:
        """To be said when other requests have begun or ceased to run."""
        self._others = None

    def shares(self, running: Sequence[RequestState]) -> tuple[list[ScheduledRequest], list[RequestState]]:
        """Of the running requests, in their order: the shares of these, and the requests that are none of these."""
        return self._columns.items.copy(), self.others(running)

    def others(self, running: Sequence[RequestState]) -> list[RequestState]:
        """The running requests that are none of these, in their order."""
        if self._others is None:
            self._others = [state for state in running if state.decode is None]
        return self._others

    def take_full(self) -> list[RequestState]:
        """Those that lack a block for the next token, once. To each `has_room` is to be said, or it has to `leave`."""
        full, self._full = self._full, []
        return [item.state for item in full if item.state.decode is item]

    def has_room(self, item: ScheduledRequest) -> None:
        """It is sure of its next token."""
        self._expect(item)

    def take(self, batch: Sequence[ScheduledRequest], tokens: Sequence[int]) -> tuple[DecodedTokens, Others]:
        """Give everyone its token, from its row of `tokens`, but for those that end with it.

        `batch`: the shares of these first, as `shares` says them, then all others. Returns what came of it, and all
        others, with those that end.
        """
        columns, rows = self._columns, range(len(self._columns.items))
        if not rows or batch[len(rows) - 1] is columns.items[-1]:
            others = _with_rows(batch[len(rows) :], len(rows))
        else:  # some of those in between have left for drafts since
            columns, rows, others = _partition(batch)
        due = [item for item in self._due.pop(self._steps, ()) if item.state.decode is item]
        self._steps += 1
        tokens_of = [tokens[row] for row in rows]
        states, request_ids, indices = columns.states, columns.request_ids.copy(), columns.indices.copy()
        if ends := columns.ends(tokens_of, due):
            others = [(columns.items[at], rows[at]) for at in ends] + others
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
                self._expect(item)
        return DecodedTokens(request_ids, indices, tokens_of), others

    def _expect(self, item: ScheduledRequest) -> None:
        """Note when this one is to be looked at."""
        state = item.state
        known = state.num_computed_tokens
        if known >= state.num_own_slots:
            self._full.append(item)
        else:
            steps = min(state.num_own_slots, state.last_position, state.next_check) - known - 1
            self._due.setdefault(self._steps + max(steps, 0), []).append(item)


class _Columns:
    """The columns of plain decodes that every step needs, one entry each, in the order of the running requests."""

    def __init__(self, items: Sequence[ScheduledRequest] = ()) -> None:
        """`items`: in that order."""
        self.items = list(items)
        self.states = [item.state for item in items]
        self.request_ids = [state.request_id for state in self.states]
        self.indices = [state.index for state in self.states]
        self._kinds = Counter(state.end_ids for state in self.states)  # few: most requests end by the same tokens
        self._end_ids = frozenset[int]().union(*self._kinds)

    def insert(self, item: ScheduledRequest) -> None:
        state = item.state
        at = bisect_right(self.states, state.order, key=_order)
        self.items.insert(at, item)
        self.states.insert(at, state)
        self.request_ids.insert(at, state.request_id)
        self.indices.insert(at, state.index)
        self._kinds[state.end_ids] += 1
        if self._kinds[state.end_ids] == 1:
            self._end_ids |= state.end_ids

    def remove(self, item: ScheduledRequest) -> None:
        at = self._place(item)
        del self.items[at], self.states[at], self.request_ids[at], self.indices[at]
        kind = item.state.end_ids
        self._kinds[kind] -= 1
        if not self._kinds[kind]:
            del self._kinds[kind]
            self._end_ids = frozenset[int]().union(*self._kinds)

    def ends(self, tokens: Sequence[int], due: Sequence[ScheduledRequest]) -> list[int]:
        """Those whose answer ends with its token: at its length or by repetition (only those `due` are looked at for
        it), or by the token itself."""
        places = {self._place(item): item for item in due}
        found = {
            at
            for at, item in places.items()
            if item.start + 1 >= item.state.last_position or item.state.until_repetition(tokens[at : at + 1])
        }
        if not self._end_ids.isdisjoint(tokens):
            found.update(at for at, token in enumerate(tokens) if token in self.states[at].end_ids)
        return sorted(found)

    def _place(self, item: ScheduledRequest) -> int:
        """Its index among those of equal order."""
        return self.items.index(item, bisect_left(self.states, item.state.order, key=_order))


def _partition(batch: Sequence[ScheduledRequest]) -> tuple[_Columns, list[int], Others]:
    """The plain decodes of a batch and their rows, and all others."""
    plain: list[ScheduledRequest] = []
    rows: list[int] = []
    others: Others = []
    for item, row in _with_rows(batch, 0):
        if item.state.decode is item:
            plain.append(item)
            rows.append(row)
        else:
            others.append((item, row))
    return _Columns(plain), rows, others


def _with_rows(batch: Sequence[ScheduledRequest], row: int) -> Others:
    """Each with the first of its rows, the first of all at `row`."""
    placed: Others = []
    for item in batch:
        placed.append((item, row))
        row += item.num_samples
    return placed


def _order(state: RequestState) -> float:
    return state.order
