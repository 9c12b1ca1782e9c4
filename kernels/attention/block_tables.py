"""Block tables of all slots: on the host, and on a GPU as a copy that is updated by changes only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..runtime.transfer import to_device

Ints = NDArray[np.int64]
BlockNumbers = NDArray[np.int32]


class BlockTables:
    """The block table of each slot, as a row of `host` (slots, blocks) int32.

    Entries after a slot's last block are undefined. A copy on the device exists from the first call of `on`. Changes
    reach the copy in the order of the device's stream, so a step in flight reads the entries from before the change.
    """

    def __init__(self, num_slots: int, num_blocks: int) -> None:
        self.host: BlockNumbers = np.zeros((num_slots, num_blocks), np.int32)
        self._copy: Tensor | None = None

    @classmethod
    def of(cls, blocks: BlockNumbers) -> BlockTables:
        """Return a single table of `blocks`."""
        tables = cls(1, len(blocks))
        tables.host[0] = blocks
        return tables

    @property
    def flat(self) -> BlockNumbers:
        """All tables, one after the other, as a view."""
        return self.host.reshape(-1)

    @property
    def width(self) -> int:
        """Maximum number of blocks of a slot."""
        return self.host.shape[1]

    @torch.inference_mode()
    def on(self, device: torch.device) -> Tensor:
        """Return the `flat` tables on `device`, at an address that stays the same."""
        if self._copy is None:
            self._copy = to_device(torch.from_numpy(self.flat.copy()), device)
        return self._copy

    def replace(self, changes: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Replace entries. Each change is a slot, the index of its first entry to replace, and the new blocks."""
        for slot, start, blocks in changes:
            self.host[slot, start : start + len(blocks)] = blocks
        if self._copy is None or not changes:
            return
        spans = [(slot * self.width + start, len(blocks)) for slot, start, blocks in changes]
        places = np.concatenate([np.arange(first, first + length) for first, length in spans])
        with torch.inference_mode():
            staged = torch.from_numpy(np.stack((places, self.flat[places])))
            index, values = to_device(staged, self._copy.device)
            self._copy.index_copy_(0, index, values.to(torch.int32))
