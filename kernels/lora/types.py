"""Weights of adapters, and the plan of a step: which rows use which adapter.

Once per step, the host groups rows with the same adapter into tiles. All layers of the step use that plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..runtime.numeric import next_power_of_2

NO_ADAPTER = -1
#: Smallest padded rank: the smallest inner dimension of tensor cores. Ranks are padded to a power of two.
_MIN_RANK = 16
_MAX_RANK = 128


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Adapters of one linear layer. Ranks below the largest are padded with zeros."""

    # Matrix A of each adapter, (adapters, rank, inputs).
    down: Tensor
    # Matrix B of each adapter, (adapters, features, rank), multiplied by alpha / rank.
    up: Tensor

    @classmethod
    def stacked(cls, adapters: Sequence[tuple[Tensor, Tensor]]) -> LoraWeights:
        """Stack adapters, given as (rank, inputs) and (features, rank) each."""
        if not adapters:
            raise ConfigurationError("The list of LoRA adapters is empty.", param="adapters")
        most = max(down.shape[0] for down, _ in adapters)
        if most > _MAX_RANK:
            raise ConfigurationError(f"An adapter has rank {most}; the maximum is {_MAX_RANK}.", param="adapters")
        rank = max(_MIN_RANK, next_power_of_2(most))
        first_down, first_up = adapters[0]
        stack = cls(
            first_down.new_zeros(len(adapters), rank, first_down.shape[1]),
            first_up.new_zeros(len(adapters), first_up.shape[0], rank),
        )
        for index, (down, up) in enumerate(adapters):
            stack.down[index, : down.shape[0]] = down
            stack.up[index, :, : up.shape[1]] = up
        return stack


class LoraPlan:
    """The adapter of each row in a step, as tiles of rows with the same adapter, in buffers with fixed addresses.

    `rows` (max_rows,) int32: rows of the batch, ordered by adapter. `tiles` (tiles, 3) int32: a tile's start in `rows`,
    its end (exclusive) and its adapter. A tile without rows does nothing. A CUDA graph captured with this plan uses the
    latest assignment. `tile_rows`: 16 for decoding, 64 for long prompt chunks.
    """

    def __init__(self, max_rows: int, num_adapters: int, device: torch.device, *, tile_rows: int = 16) -> None:
        # Each adapter leaves at most one partial tile.
        max_tiles = max_rows // tile_rows + min(num_adapters, max_rows)
        self.tile_rows = tile_rows
        self.num_adapters = num_adapters
        self.adapters: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self.rows = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.tiles = torch.zeros(max(1, max_tiles), 3, dtype=torch.int32, device=device)

    def assign(self, adapters: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Assign an adapter to each row, or `NO_ADAPTER`. Does not wait for the device."""
        chosen = np.asarray(adapters, np.int32)
        if len(chosen) > len(self.rows):
            raise ConfigurationError(f"{len(chosen)} rows exceed the plan's {len(self.rows)} rows.", param="adapters")
        if len(chosen) and not NO_ADAPTER <= chosen.min() <= chosen.max() < self.num_adapters:
            raise ConfigurationError(f"Adapter numbers must be below {self.num_adapters}.", param="adapters")
        order = np.argsort(chosen, kind="stable").astype(np.int32)
        tiles = np.zeros(tuple(self.tiles.shape), np.int32)
        for place, tile in enumerate(_tiles(chosen[order], self.tile_rows)):
            tiles[place] = tile
        self.adapters = chosen.copy()
        _upload(self.rows, order)
        _upload(self.tiles, tiles)


def _tiles(adapters: npt.NDArray[np.int32], tile_rows: int) -> list[tuple[int, int, int]]:
    """Return (start, end, adapter) of each tile of the sorted `adapters`."""
    tiles: list[tuple[int, int, int]] = []
    # Rows without an adapter are first in the order; the first border is their end, so that no tile covers these rows.
    borders = [*np.flatnonzero(np.diff(adapters, prepend=NO_ADAPTER)).tolist(), len(adapters)]
    for start, end in itertools.pairwise(borders):
        adapter = int(adapters[start])
        tiles += [(first, min(first + tile_rows, end), adapter) for first in range(start, end, tile_rows)]
    return tiles


def _upload(buffer: Tensor, values: npt.NDArray[np.int32]) -> None:
    """Enqueue a copy of `values` to the front of `buffer`. Torch frees the pinned memory only after the copy."""
    staged = torch.from_numpy(values)
    if buffer.is_cuda:
        staged = staged.pin_memory()
    buffer[: len(values)].copy_(staged, non_blocking=True)
