"""Steps launched on the device whose results may not be read yet.

Without overlap, host and GPU would wait for each other between steps. So if the next batch is certain
(`Scheduler.ahead`), its step is launched on the previous step's tokens while these are still on the device. Requests
scheduled after the read find their row in that step (`LaunchedStep.of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..types.request_state import ScheduledRequest
from ..types.sampling_row import SamplingRow
from .host_device_copy import HostCopy, to_device


@dataclass(slots=True)  # not frozen: frozen instances take longer to create, and each step creates one
class LaunchedStep:
    """A step whose results may not be computed yet."""

    batch: Sequence[ScheduledRequest]
    # Sampled token of each row of `batch`, (rows,) int64.
    sampled: Tensor
    # Sampling parameters of each row.
    rows: Sequence[SamplingRow]
    # Logits (rows, vocab) float32, valid until the next launch; None if the step was launched ahead.
    logits: Tensor | None
    _copy: HostCopy = field(init=False)

    def __post_init__(self) -> None:
        self._copy = HostCopy(self.sampled)

    def read(self) -> list[int]:
        """Return the token of each row. Waits for this step, but not for later ones."""
        return self._copy.tolist()

    @property
    def is_reliable(self) -> bool:
        """Whether all requests are plain decodes whose logit edits do not depend on the token of this step."""
        return all(item.state.decode is item and not item.state.edits_follow for item in self.batch)

    def of(self, batch: Sequence[ScheduledRequest]) -> LaunchedStep | None:
        """Return this step's rows for `batch`; None if `batch` is empty or has requests or work not in this step.

        Rows of requests that have left since are discarded.
        """
        if batch == self.batch and self.is_reliable:
            return self
        places = {item: row for row, item in enumerate(self.batch) if item.state.decode is item}
        rows = [places.get(item) for item in batch]
        chosen = [row for row in rows if row is not None]
        if not chosen or len(chosen) < len(rows):
            return None
        sampled = self.sampled[to_device(torch.tensor(chosen), self.sampled.device)]
        return LaunchedStep(batch, sampled, [self.rows[row] for row in chosen], None)
