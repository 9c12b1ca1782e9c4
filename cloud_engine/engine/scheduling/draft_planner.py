"""The scheduler's interface to the `Speculator`, which may spend the rest of a step's token budget on drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..types.request_state import RequestState, ScheduledRequest

Grow = Callable[[RequestState, int], bool]


class DraftPlanner(Protocol):
    """Grants drafts to scheduled requests; implemented by `Speculator`."""

    @property
    def draft_tokens(self) -> int:
        """Number of draft tokens in this step: first the granted tokens, after the step the verified ones."""
        ...

    def grant(
        self, decodes: Sequence[ScheduledRequest], other_items: Sequence[ScheduledRequest], budget: int, grow: Grow
    ) -> list[ScheduledRequest]:
        """Grant at most `budget` draft tokens. `grow` allocates a request's blocks, or returns False if none are free.

        `decodes` are plain decodes, which have no predictions. Returns the requests that drafters will draft for.
        """
        ...

    def may_draft(self, sequences: int) -> bool:
        """Return whether plain decodes may get drafts in the next step, which has this number of `sequences`."""
        ...
