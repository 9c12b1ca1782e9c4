"""The interface between scheduler and speculation: whom to grant drafts with what is left of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..types.request_state import RequestState, ScheduledRequest

Grow = Callable[[RequestState, int], bool]


class DraftPlanner(Protocol):
    """`Speculator` is the one that serves."""

    @property
    def draft_tokens(self) -> int:
        """Draft tokens of this step: as many as were granted, once it is over as many as were verified."""
        ...

    def grant(
        self, decodes: Sequence[ScheduledRequest], others: Sequence[ScheduledRequest], budget: int, grow: Grow
    ) -> list[ScheduledRequest]:
        """Give drafts at most `budget` tokens of the step. `grow` gets a request blocks, or says there are none.

        `decodes`: the plain ones, none of which has a prediction. Returns whom the drafters are to draft for.
        """
        ...

    def may_draft(self, sequences: int) -> bool:
        """Whether plain decodes may get drafts in the step behind the one under way, if it is over so many."""
        ...
