"""Plain decodes: what most requests do in most steps, namely to get one token, with nothing to decide about it.

At 256 sequences a step has half a microsecond for each, so nothing is done for one of them that can be done for all or
can wait. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from .kv_cache import KVCacheManager
from .request import RequestState
from .scheduled_request import ScheduledRequest
from .step_outputs import DecodedTokens

#: Full blocks of an answer that others can find together: several are hashed in little more time than one.
BLOCKS_AT_ONCE = 4

#: Shares of a step that are no plain decodes, each with the first of its rows.
Others = list[tuple[ScheduledRequest, int]]


class PlainDecodes:
    """Those of the running requests that get one token in every step, from the time they join until they leave.

    Their shares of a step are made once (`RequestState.decode`). A request is looked at again only when its time has
    come: its blocks will be full, or its answer at its length, in a step that is known beforehand. All other tokens are
    appended unseen, unless one of them ends an answer.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._steps = 0  # taken so far
        self._due: dict[int, list[ScheduledRequest]] = {}  # step -> who is to be looked at behind it; some have left
        self._full: list[ScheduledRequest] = []  # who needs a block before the next step; some have left
        self._columns: _Columns | None = None  # None: one of them has left
        self._outdated = False  # by who joined, or came or went beside them

    def join(self, state: RequestState) -> None:
        """For a running request that has just got a token: keep its share, if only a plain decode can come of it."""
        request = state.request
        if state.grammar is None and request.params.logprobs is None and not request.draft_ids:
            state.decode = ScheduledRequest(state, 1)
            self._expect(state.decode)
            self._outdated = True

    def leave(self, state: RequestState) -> None:
        """Something else is to happen to a request that may be one of these."""
        if state.decode is not None:
            state.decode = None
            self._columns = None

    def running_changed(self) -> None:
        """To be said when other requests have begun or ceased to run."""
        self._outdated = True

    def shares(self, running: Sequence[RequestState]) -> tuple[list[ScheduledRequest], list[RequestState]]:
        """Of the running requests, in their order: the shares of these, and the requests that are none of these."""
        if self._columns is None or self._outdated:
            self._columns = _Columns.of([state.decode for state in running if state.decode is not None])
            self._columns.others = [state for state in running if state.decode is None]
            self._outdated = False
        return self._columns.items, self._columns.others

    def in_need(self) -> list[RequestState]:
        """Who lacks a block for the next token. To each of them `has_room` is to be said, or it has to `leave`."""
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
        if self._columns is None:  # some of them got drafts meanwhile
            columns, rows, others = _sorted_out(batch)
            tokens_of = [tokens[row] for row in rows]
        else:
            columns = self._columns
            rows, tokens_of = range(len(columns.items)), tokens[: len(columns.items)]
            others = _with_rows(batch[len(rows) :], len(rows))
        due = self._due.pop(self._steps, [])
        self._steps += 1
        if ending := columns.ending(tokens_of, due):
            kept = [index for index, item in enumerate(columns.items) if item not in ending]
            others = [(item, row) for item, row in zip(columns.items, rows, strict=True) if item in ending] + others
            columns, tokens_of = columns.only(kept), [tokens_of[index] for index in kept]
        for state, token in zip(columns.states, tokens_of, strict=True):
            state.token_ids.append(token)
            state.num_computed_tokens += 1
        for item in due:
            if item.state.decode is item and item not in ending:
                if len(item.state.block_table) % BLOCKS_AT_ONCE == 0:
                    self._cache.register(item.state)
                self._expect(item)
        return DecodedTokens(columns.request_ids, columns.indices, list(tokens_of)), others

    def _expect(self, item: ScheduledRequest) -> None:
        """Note when this one is to be looked at."""
        state = item.state
        known = state.num_computed_tokens
        if known >= state.num_own_slots:
            self._full.append(item)
        else:
            steps = min(state.num_own_slots, state.last_position) - known - 1
            self._due.setdefault(self._steps + max(steps, 0), []).append(item)


@dataclass(slots=True)
class _Columns:
    """What is needed of plain decodes in every step, one entry each."""

    items: list[ScheduledRequest]
    states: list[RequestState]
    request_ids: list[str]
    indices: list[int]
    end_ids: frozenset[int]  # of any of them
    others: list[RequestState]  # who runs beside them

    @classmethod
    def of(cls, items: list[ScheduledRequest]) -> Self:
        states = [item.state for item in items]
        end_ids = frozenset[int]().union(*{state.end_ids for state in states})
        return cls(
            items, states, [state.request_id for state in states], [state.index for state in states], end_ids, []
        )

    def only(self, kept: Sequence[int]) -> _Columns:
        return _Columns.of([self.items[index] for index in kept])

    def ending(self, tokens: Sequence[int], due: Sequence[ScheduledRequest]) -> set[ScheduledRequest]:
        """Whose answer ends with its token: at its length, which only those `due` can have reached, or by the token."""
        ending = {item for item in due if item.state.num_computed_tokens + 1 >= item.state.last_position}
        if not self.end_ids.isdisjoint(tokens):
            ending.update(item for item, token in zip(self.items, tokens, strict=True) if token in item.state.end_ids)
        return ending


def _sorted_out(batch: Sequence[ScheduledRequest]) -> tuple[_Columns, list[int], Others]:
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
    return _Columns.of(plain), rows, others


def _with_rows(batch: Sequence[ScheduledRequest], row: int) -> Others:
    """Each with the first of its rows, the first of all at `row`."""
    placed: Others = []
    for item in batch:
        placed.append((item, row))
        row += item.num_samples
    return placed
