"""The plan builder: assigns slots to requests, and builds the `StepPlan` of a scheduled batch. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ..kv.kv_cache_manager import KVCacheManager
from ..step import DraftGrant, NewBlocks, NewSequence, StepPlan
from ..types.request_state import RequestState, ScheduledRequest


class PlanBuilder:
    """Assigns slots and builds plans. The slot of an ended sequence is free from the next plan on.

    A plan advances its requests at once, as if all drafts were accepted, so that the next plan needs no result.
    """

    def __init__(self, cache: KVCacheManager, num_slots: int) -> None:
        self._cache = cache
        self._free = list(reversed(range(num_slots)))
        self._ended: list[int] = []
        self._num_plans = 0

    def end(self, state: RequestState) -> None:
        """Free the slot of a request that ends or is preempted; do nothing if it has none."""
        if state.slot >= 0:
            self._ended.append(state.slot)
            self._free.append(state.slot)
            state.slot = -1

    def plan(self, decode_slots: list[int], other_items: Sequence[ScheduledRequest] = ()) -> StepPlan:
        """Build the plan of plain decodes, and then of `other_items`."""
        ended, self._ended = self._ended, []
        new: list[NewSequence] = []
        drafts: dict[int, list[int]] = {}
        grants: dict[int, DraftGrant] = {}
        num_decodes = len(decode_slots)
        slots = [*decode_slots] if other_items else decode_slots
        counts = [1] * num_decodes
        for item in other_items:
            state = item.state
            if state.slot < 0:
                state.slot = self._free.pop()
                new.append(_new_sequence(state, state.slot))
            item.num_planned_drafts, state.unread_drafts = len(item.draft_ids), item.draft_ids
            if item.drafter is not None:
                grants[state.slot] = DraftGrant(item.drafter, item.num_drafts)
                item.num_planned_drafts = item.num_drafts
            elif item.draft_ids:
                drafts[state.slot] = item.draft_ids
            slots.append(state.slot)
            counts.append(item.num_tokens)
            state.num_computed_tokens += item.num_tokens + item.num_planned_drafts
            self._cache.register(state)
        self._num_plans += 1
        return StepPlan(self._num_plans, slots, counts, num_decodes, new, self._new_blocks(), ended, drafts, grants)

    def _new_blocks(self) -> list[NewBlocks]:
        new_blocks: list[NewBlocks] = []
        for state in self._cache.take_grown():
            start = state.num_planned_blocks
            if state.slot >= 0 and len(state.block_table) > start:
                new_blocks.append(NewBlocks(state.slot, start, state.block_table[start:]))
                state.num_planned_blocks = len(state.block_table)
        return new_blocks


def _new_sequence(state: RequestState, slot: int) -> NewSequence:
    state.num_planned_blocks = len(state.block_table)
    return NewSequence(
        slot,
        list(state.token_ids),
        state.num_prompt_tokens,
        state.max_tokens,
        state.params,
        state.seed,
        state.end_ids,
        list(state.block_table),
        state.num_computed_tokens,
        state.num_draft_computed_tokens,
        len(state.prompt_logprobs) if state.scores_prompt else None,
        state.request.embed,
        state.grammar is not None,
    )
