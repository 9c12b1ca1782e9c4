"""The interface of drafters: guess the next tokens of a request, for the target to verify in one pass.

Whatever a drafter says, the answer stays the same (see `sampler`): a bad one only costs time. So drafters may be added
freely, and `speculation` finds out by measuring which of them pay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..types.request_state import RequestState, ScheduledRequest
    from ..types.sampling_row import RowOf


@dataclass(frozen=True, slots=True)
class DraftWork:
    """The work of a draft model in a step."""

    # Tokens that the target had computed and it had not; the first pass computed them, too.
    lag: int = 0
    first_pass_s: float = 0.0
    drafting: int = 0
    passes: int = 0


class Drafter(ABC):
    """`name` goes into the statistics, which count "draft" and "ngram" (`EngineStats`).

    `takes_passes`: every token takes a pass of a model, so drafts are not free.
    """

    name: str
    takes_passes: bool = False

    @abstractmethod
    def offer(self, state: RequestState, limit: int) -> int:
        """The number of the request's next tokens that it would guess now, at most `limit`; 0 where it has no idea."""

    @abstractmethod
    def propose(self, batch: Sequence[ScheduledRequest], row_of: RowOf) -> DraftWork:
        """Fill in `draft_ids` where this drafter was granted `num_drafts` of them; it may give fewer."""

    def lag(self, state: RequestState) -> int:
        """Tokens that it has to compute for the request before its first guess."""
        del state
        return 0

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Follow the target in copying KV blocks, (source, target) each."""
        del copies
