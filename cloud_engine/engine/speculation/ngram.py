"""The n-gram drafter: proposes the tokens that followed the same n-gram earlier in the request's text.

Prompt lookup (Saxena 2023): answers often quote their prompt and themselves. Needs no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .drafter import Drafter, DraftWork

if TYPE_CHECKING:
    from ..types.request_state import RequestState, ScheduledRequest
    from ..types.sampling_row import RowOf


class NgramDrafter(Drafter):
    """Proposes the tokens that followed the request's last n-gram earlier in its prompt or answer."""

    name = "ngram"

    def offer(self, state: RequestState, limit: int) -> int:
        start = state.drafts.ngrams.find(state.token_ids)
        return 0 if start is None else min(limit, len(state.token_ids) - start)

    def propose(self, batch: Sequence[ScheduledRequest], row_of: RowOf) -> DraftWork:
        del row_of
        for item in batch:
            if item.drafter == self.name:
                start = item.state.drafts.ngrams.find(item.state.token_ids)
                assert start is not None, "drafts are only granted after an offer"
                item.draft_ids = item.state.token_ids[start : start + item.num_drafts]
        return DraftWork()
