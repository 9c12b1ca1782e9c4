"""The sampling of one row of logits."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ....protocol.sampling import ResolvedParams
from ....text.grammars.state import Mask
from ....text.logit_edits import LogitEdits
from .request_state import ScheduledRequest


class SamplingRow(msgspec.Struct, frozen=True, gc=False):
    """The parameters with which one row of logits is sampled."""

    seed: int
    # Index in the sequence of the token to be sampled.
    position: int
    params: ResolvedParams
    # Changes to the logits before sampling.
    edits: LogitEdits | None = None
    # Tokens that a grammar allows; None for all.
    mask: Mask | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it depends on nothing but its logits, its noise, and how many come first."""
        return self.edits is None and self.mask is None and self.params.typical_p >= 1


#: How the target will sample a request's next token after as many of its drafts: see `Engine._sampling_row`.
RowOf = Callable[[ScheduledRequest, int], SamplingRow]
