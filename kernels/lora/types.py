"""The weights of adapters, and the plan of a step: which rows use which adapter.

Rows with the same adapter are put together in tiles once per step, on the host. All layers of the step use that plan.
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
#: Ranks are padded to a power of two of at least this, the least inner dimension of tensor cores.
_MIN_RANK = 16
_MAX_RANK = 128


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The adapters of one linear layer. Ranks below the largest are padded with zeros."""

    # A of each adapter, (adapters, rank, inputs).
    down: Tensor
    # B of each adapter, (adapters, features, rank), with the factor alpha / rank in it.
    up: Tensor

    @classmethod
    def stacked(cls, adapters: Sequence[tuple[Tensor, Tensor]]) -> LoraWeights:
        """From one (rank, inputs), (features, rank) of each adapter."""
        if not adapters:
            raise ConfigurationError("There are no adapters to stack.", param="adapters")
        most = max(down.shape[0] for down, _ in adapters)
        if most > _MAX_RANK:
            raise ConfigurationError(f"An adapter of rank {most}: at most {_MAX_RANK} is supported.", param="adapters")
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
    """The adapter of each row of a step, as tiles of rows with the same one, in buffers that keep their addresses.

    `rows` (max_rows,) int32: rows of the batch in the order of their adapters. `tiles` (tiles, 3) int32: a tile's start
    in `rows`, its end (exclusive) and its adapter. A tile without rows does nothing. A CUDA graph captured with this
    plan uses what was assigned last. `tile_rows`: 16 for decoding, 64 for long chunks of prompts.
    """

    def __init__(self, max_rows: int, num_adapters: int, device: torch.device, *, tile_rows: int = 16) -> None:
        # Each adapter leaves at most one tile that is not full.
        max_tiles = max_rows // tile_rows + min(num_adapters, max_rows)
        self.tile_rows = tile_rows
        self.num_adapters = num_adapters
        self.adapters: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self.rows = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.tiles = torch.zeros(max(1, max_tiles), 3, dtype=torch.int32, device=device)

    def assign(self, adapters: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """`adapters`: one for each row, NO_ADAPTER for none. Does not wait for the device."""
        chosen = np.asarray(adapters, np.int32)
        if len(chosen) > len(self.rows):
            raise ConfigurationError(f"{len(chosen)} rows do not fit a plan for {len(self.rows)}.", param="adapters")
        if len(chosen) and not NO_ADAPTER <= chosen.min() <= chosen.max() < self.num_adapters:
            raise ConfigurationError(f"An adapter is not among the {self.num_adapters} there are.", param="adapters")
        order = np.argsort(chosen, kind="stable").astype(np.int32)
        tiles = np.zeros(tuple(self.tiles.shape), np.int32)
        for place, tile in enumerate(_tiles(chosen[order], self.tile_rows)):
            tiles[place] = tile
        self.adapters = chosen.copy()
        _upload(self.rows, order)
        _upload(self.tiles, tiles)


def _tiles(adapters: npt.NDArray[np.int32], tile_rows: int) -> list[tuple[int, int, int]]:
    """(start, end, adapter) of each tile of the sorted `adapters`."""
    found: list[tuple[int, int, int]] = []
    # Rows without an adapter come first, and the first border is behind them.
    borders = [*np.flatnonzero(np.diff(adapters, prepend=NO_ADAPTER)).tolist(), len(adapters)]
    for start, end in itertools.pairwise(borders):
        adapter = int(adapters[start])
        found += [(first, min(first + tile_rows, end), adapter) for first in range(start, end, tile_rows)]
    return found


def _upload(buffer: Tensor, values: npt.NDArray[np.int32]) -> None:
    """Copies to the front of `buffer`, in stream order. The pinned memory is freed after the copy."""
    staged = torch.from_numpy(values)
    if buffer.is_cuda:
        staged = staged.pin_memory()
    buffer[: len(values)].copy_(staged, non_blocking=True)
