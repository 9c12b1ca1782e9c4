"""Sampling parameters per row of logits."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ....protocol.sampling import ResolvedParams
from ....text.grammars.state import Mask
from ....text.logit_edits import LogitEdits
from .slot_state import SlotState


class SamplingRow(msgspec.Struct, frozen=True, gc=False):
    """The sampling parameters of one row of logits."""

    seed: int
    # Position of the token to sample, counted from the start of the sequence.
    position: int
    params: ResolvedParams
    # Changes to the logits before sampling.
    edits: LogitEdits | None = None
    # Tokens that the grammar allows; None allows all.
    mask: Mask | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether the row has no logit edits, no grammar mask and no typical_p."""
        return self.edits is None and self.mask is None and self.params.typical_p >= 1


#: Function of a sequence and n: sampling parameters of the token after n drafts (`Worker.draft`).
RowOf = Callable[[SlotState, int], SamplingRow]
