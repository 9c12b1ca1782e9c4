"""A step that is on its way through the device, or through already.

On a GPU the host would have nothing to do until a step's tokens are there, and the device nothing until the host has
dealt with them. So a step that is sure (`Scheduler.ahead`) is launched on the tokens of the one before it while these
are still on the device; who is scheduled when they have been read finds its row there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..types.request_state import ScheduledRequest
from ..types.sampling_row import SamplingRow
from .host_device_copy import HostCopy, to_device


@dataclass(slots=True)  # one is made in every step, and frozen ones take longer
class LaunchedStep:
    """A step whose results may not be computed yet."""

    batch: Sequence[ScheduledRequest]
    # (rows,) int64: a token for each row of `batch`.
    sampled: Tensor
    # How the rows are sampled.
    rows: Sequence[SamplingRow]
    # (rows, vocab) float32, until the next launch; None of a step that was launched ahead.
    logits: Tensor | None
    _copy: HostCopy = field(init=False)

    def __post_init__(self) -> None:
        self._copy = HostCopy(self.sampled)

    def read(self) -> list[int]:
        """The token of each row. Waits for this step, and not for one behind it."""
        return self._copy.tolist()

    @property
    def is_reliable(self) -> bool:
        """Whether all are plain decodes, and the next token of none depends on what this one is but by its logits."""
        return all(item.state.decode is item and not item.state.edits_follow for item in self.batch)

    def of(self, batch: Sequence[ScheduledRequest]) -> LaunchedStep | None:
        """The same step for a `batch` that was scheduled meanwhile; None if that has others in it, or other work.

        Whoever has left since was computed in vain.
        """
        if batch == self.batch and self.is_reliable:
            return self
        places = {item: row for row, item in enumerate(self.batch) if item.state.decode is item}
        rows = [places.get(item) for item in batch]
        found = [row for row in rows if row is not None]
        if not found or len(found) < len(rows):
            return None
        sampled = self.sampled[to_device(torch.tensor(found), self.sampled.device)]
        return LaunchedStep(batch, sampled, [self.rows[row] for row in found], None)
