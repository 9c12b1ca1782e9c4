"""Launch parameters of paged attention: the tile of one program, and the splits of long sequences.

The functions depend only on shapes and lengths, so that they can be tested without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...protocol.errors import ConfigurationError
from ..runtime.launch import Launch
from ..runtime.numeric import next_power_of_2

BLOCK_SIZES = (16, 64)
MAX_HEAD_DIM = 256
#: Rows per tile: matrix instructions need the minimum; beyond the maximum, accumulators spill.
_MIN_ROWS, _MAX_ROWS = 16, 128
_MAX_ROWS_FP32 = 32  # float32 is multiplied without tensor cores, and the operands need far more registers
#: Bytes of the keys in a tile, so that three stages of keys and values and the queries fit an A100's shared memory.
_TILE_BYTES = 16 * 1024
_MIN_KEYS, _MAX_KEYS = 16, 64
_SHARED_BYTES = 228 * 1024  # shared memory of a Hopper multiprocessor
_SHARED_OF_PROGRAM = 1024  # bytes that the driver reserves per program
_SCRATCH_OF_ROW = 128  # bytes per row for exchanges within a warp; Hopper's asynchronous products need none
_WARPS_OF_MULTIPROCESSOR = 12  # warps at a time, limited by registers
_MIN_ASYNC_ROWS = 64  # minimum for Hopper's asynchronous products, which keep one more tile in shared memory
#: Fixed costs of a program, and of the launch that merges splits, in keys that could be read in the same time.
_PROGRAM_KEYS, _MERGE_KEYS = 96, 256
_MAX_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Properties of a model and its KV cache that determine the launch."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    # Bytes per cache element.
    cache_bytes: int = 2
    # Whether any layer has a sliding window, which needs extra registers.
    windowed: bool = False

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ConfigurationError(
                f"block_size={self.block_size}: the attention kernel supports {BLOCK_SIZES}.", param="block_size"
            )
        if self.kv_heads < 1 or self.heads % self.kv_heads or self.group > _MAX_ROWS:
            raise ConfigurationError(
                f"{self.heads} query heads over {self.kv_heads} KV heads: the attention kernel needs a whole number of "
                f"query heads for each KV head, {_MAX_ROWS} at most."
            )
        if self.head_dim % 16 or not 0 < self.head_dim <= MAX_HEAD_DIM:
            raise ConfigurationError(
                f"head_dim={self.head_dim}: the attention kernel supports multiples of 16 up to {MAX_HEAD_DIM}."
            )

    @property
    def group(self) -> int:
        """Number of query heads that read the same KV head."""
        return self.heads // self.kv_heads

    @property
    def padded_dim(self) -> int:
        return next_power_of_2(self.head_dim)


def attention_launch(shape: AttentionShape, max_queries: int) -> Launch:
    """Return the launch for batches with up to `max_queries` tokens per sequence, chosen so that no register spills.

    BLOCK_M: rows per tile, which are tokens times the query heads of one KV head. BLOCK_N: keys per tile.
    """
    rows = tile_rows(shape, max_queries)
    if shape.cache_bytes == 4:
        return _float32_launch(shape, rows)
    keys = _keys_of_tile(shape)
    if shape.cache_bytes == 1 and shape.padded_dim > 128 and rows > _MIN_ROWS:
        keys //= 2  # after conversion from FP8, keys are two bytes wide
    # The registers of four warps suffice for 64 rows of 128 elements only if there is no window, and if all keys of a
    # tile are in one block.
    is_crowded = shape.cache_bytes == 2 and (shape.windowed or shape.block_size < keys)
    wide = rows * shape.padded_dim >= 64 * 256 or (is_crowded and rows >= 64 and shape.padded_dim == 128)
    tiles = {"BLOCK_M": rows, "BLOCK_N": keys}
    return Launch(num_warps=8 if wide or rows == _MAX_ROWS else 4, num_stages=3, tiles=tiles)


def tile_rows(shape: AttentionShape, max_queries: int) -> int:
    """Return the rows per tile: as many as needed so that a sequence's keys are read only once, up to a maximum."""
    most = _MAX_ROWS
    if shape.cache_bytes == 4:
        most = _MAX_ROWS_FP32
    elif shape.padded_dim > 128:
        most = _MAX_ROWS // 2
    rows = min(max(max_queries, 1) * shape.group, most)
    return next_power_of_2(max(rows, shape.group, _MIN_ROWS))


def queries_per_tile(shape: AttentionShape, launch: Launch) -> int:
    return launch.tiles["BLOCK_M"] // shape.group


def programs_at_once(shape: AttentionShape, launch: Launch, multiprocessors: int) -> int:
    """Return the number of programs that the GPU holds at a time, limited by shared memory and warps."""
    tile = launch.tiles["BLOCK_N"] * shape.padded_dim * shape.cache_bytes
    query = launch.tiles["BLOCK_M"] * shape.padded_dim * max(shape.cache_bytes, 2)
    waits = launch.tiles["BLOCK_M"] < _MIN_ASYNC_ROWS
    scratch = launch.tiles["BLOCK_M"] * _SCRATCH_OF_ROW if waits else 0
    needed = 2 * tile * (launch.num_stages - waits) + query + scratch + _SHARED_OF_PROGRAM
    by_memory = _SHARED_BYTES // needed
    return multiprocessors * max(1, min(by_memory, _WARPS_OF_MULTIPROCESSOR // launch.num_warps))


def extra_splits(shape: AttentionShape, launch: Launch, multiprocessors: int) -> int:
    """Return the maximum number of splits in a step in addition to its tiles, which determines the size of buffers."""
    return 2 * programs_at_once(shape, launch, multiprocessors) // shape.kv_heads


def split_lengths(
    keys: NDArray[np.int64], shape: AttentionShape, launch: Launch, multiprocessors: int
) -> NDArray[np.int64]:
    """Return the number of keys per split for each tile, a multiple of BLOCK_N. `keys`: keys that each tile sees.

    Compares a few split lengths by estimated time. The estimate is the smaller of two: the number of rounds of programs
    times the longest split, or all work spread evenly over the GPU plus the longest split.
    """
    step = launch.tiles["BLOCK_N"]
    places = programs_at_once(shape, launch, multiprocessors) / shape.kv_heads
    max_splits = len(keys) + extra_splits(shape, launch, multiprocessors)
    best, best_time = _even(keys, int(keys.max(initial=1)), step), float("inf")
    for rounds in range(_MAX_ROUNDS + 1):
        # The candidate of zero rounds splits no tile.
        lengths = best if rounds == 0 else _even(keys, int(keys.sum() / (places * rounds)), step)
        splits, longest = int(num_splits(keys, lengths).sum()), int(lengths.max(initial=step))
        is_cut = splits > len(keys)
        around = _PROGRAM_KEYS + is_cut * _partial_keys(shape, launch)
        in_rounds = -(-splits // places) * (longest + around)
        greedily = (int(keys.sum()) + splits * around) / places + longest
        time = min(in_rounds, greedily) + is_cut * _MERGE_KEYS
        if splits <= max_splits and time < best_time:
            best, best_time = lengths, time
    return best


def num_splits(keys: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of splits of each tile; a tile that sees no keys has one."""
    return np.maximum(-(-keys // lengths), 1)


def _float32_launch(shape: AttentionShape, rows: int) -> Launch:
    """Return a launch with fewer keys per tile, and more warps for more rows, because float32 needs more registers."""
    keys = _MIN_KEYS if rows > _MIN_ROWS else min(_keys_of_tile(shape), shape.block_size)
    return Launch(num_warps=8 if rows > _MIN_ROWS else 4, num_stages=3, tiles={"BLOCK_M": rows, "BLOCK_N": keys})


def _keys_of_tile(shape: AttentionShape) -> int:
    return min(max(_TILE_BYTES // (shape.padded_dim * shape.cache_bytes), _MIN_KEYS), _MAX_KEYS)


def _partial_keys(shape: AttentionShape, launch: Launch) -> int:
    """Return the cost of writing and reading a tile's float32 results, in keys of the same total size."""
    return launch.tiles["BLOCK_M"] * 4 // shape.cache_bytes


def _even(keys: NDArray[np.int64], most: int, step: int) -> NDArray[np.int64]:
    """Cut each tile's `keys` into equal splits of about `most` keys. Return the lengths, rounded to `step`."""
    equal = -(-keys // num_splits(keys, np.array(max(most, step))))
    return np.maximum(-(-equal // step), 1) * step
