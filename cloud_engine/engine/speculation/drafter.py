"""The interface of drafters, which guess the next tokens of a request, and the n-gram drafter, which needs no model.

The target verifies the guesses in one pass. Rounding aside, drafters never change the answer (see `sampler`): a bad
drafter only costs time. So drafters can be added freely, and measurements show which ones pay off.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..types.draft_record import NgramIndex, num_assumed

if TYPE_CHECKING:
    from ..types.request_state import RequestState
    from ..worker.slots import RowsOf, SlotState
    from .cost_table import DraftingCosts


class Drafter(ABC):
    """Base class of drafters. `EngineStats` has counters for the names "draft" and "ngram".

    `takes_passes` is whether each draft token needs a pass of a model, so that drafting takes time.
    """

    name: str
    takes_passes: bool = False
    #: Costs of the passes; None if unknown or if no passes are needed.
    costs: DraftingCosts | None = None

    @abstractmethod
    def offer(self, state: RequestState, limit: int) -> int:
        """Return how many tokens, at most `limit`, this drafter would guess for the request now."""

    @abstractmethod
    def propose(self, batch: Sequence[SlotState], rows_of: RowsOf) -> None:
        """Fill `draft_ids` of the sequences granted to this drafter, each with at most `num_drafts` tokens."""

    def lag(self, state: RequestState) -> int:
        """Return the number of known tokens that the drafter must compute before its first guess."""
        del state
        return 0


class NgramDrafter(Drafter):
    """Proposes the tokens that followed the request's last n-gram earlier in its text: prompt lookup (Saxena 2023).

    If the last step is unread, its tokens are assumed to follow the earlier text too.
    """

    name = "ngram"

    def offer(self, state: RequestState, limit: int) -> int:
        return min(limit, len(_continuation(state, state.drafts.ngrams, limit)))

    def propose(self, batch: Sequence[SlotState], rows_of: RowsOf) -> None:
        del rows_of
        for item in batch:
            if item.drafter == self.name:
                item.draft_ids = _continuation(item, item.ngrams, item.num_drafts)


def _continuation(state: RequestState | SlotState, ngrams: NgramIndex, limit: int) -> list[int]:
    """Return at most `limit` tokens to draft: those that followed the last n-gram before."""
    start = ngrams.find(state.token_ids)
    if start is None:
        return []
    pending = state.num_pending_tokens
    start += num_assumed(pending, list(state.token_ids[start : start + pending]), state.unread_drafts)
    return [int(token) for token in state.token_ids[start : start + limit]]
