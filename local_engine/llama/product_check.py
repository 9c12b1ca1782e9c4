"""Matrix products of our own under llama.cpp: for which types of weights, and whether their results are right."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_F32 = 0  # of enum ggml_type
_SIZES = ((16, 1, 9), (18, 3, 8), (17, 18, 8))  # rows of weights and activations, blocks: tiles and what is left
_TOLERANCE = 1e-5  # of the largest result: sums in another order differ by a tenth of that
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class WeightKind:
    """A type of quantised weights as ggml has it."""

    name: str
    # Of `enum ggml_type`.
    number: int
    # In one block.
    values: int
    block_bytes: int
    # Offsets of numbers of half precision in a block.
    halves_at: tuple[int, ...]
    # The type that activations are quantised to, and the bytes of its blocks.
    activation_type: int
    activation_bytes: int
    # ggml's function that quantises activations.
    quantizer: str
    # ggml's function that multiplies one row by one.
    dot: str


KINDS = (
    WeightKind("Q4_0", 2, 32, 18, (0,), 8, 34, "quantize_row_q8_0", "ggml_vec_dot_q4_0_q8_0"),
    WeightKind("Q5_0", 6, 32, 22, (0,), 8, 34, "quantize_row_q8_0", "ggml_vec_dot_q5_0_q8_0"),
    WeightKind("Q8_0", 8, 32, 34, (0,), 8, 34, "quantize_row_q8_0", "ggml_vec_dot_q8_0_q8_0"),
    WeightKind("Q4_K", 12, 256, 144, (0, 2), 15, 292, "quantize_row_q8_K", "ggml_vec_dot_q4_K_q8_K"),
    WeightKind("Q5_K", 13, 256, 176, (0, 2), 15, 292, "quantize_row_q8_K", "ggml_vec_dot_q5_K_q8_K"),
    WeightKind("Q6_K", 14, 256, 210, (208,), 15, 292, "quantize_row_q8_K", "ggml_vec_dot_q6_K_q8_K"),
)


@dataclass(frozen=True, slots=True)
class Factors:
    """Blocks of weights and of activations as they lie in memory: (rows, blocks, bytes) each."""

    kind: WeightKind
    weights: Bytes
    activations: Bytes

    @classmethod
    def scrambled(cls, ggml: ctypes.CDLL, kind: WeightKind, size: tuple[int, int, int]) -> Factors:
        """Without a pattern. `size`: rows of weights and of activations, blocks in a row."""
        rows, columns, blocks = size
        return cls(kind, _weights(kind, rows, blocks), _activations(ggml, kind, columns, blocks))

    def product(self, function: Any, threads: int = 2) -> Floats | None:
        """The product by `function`, a `llamafile_sgemm`, one thread after the other: (rows of activations, rows
        of weights). None if it computes no such product."""
        (rows, blocks, _), columns = self.weights.shape, len(self.activations)
        result = np.zeros((columns, rows), np.float32)
        function.restype = ctypes.c_bool
        for thread in range(threads):
            params = (ctypes.c_int * 16)(thread, threads)  # longer than ggml_compute_params, which begins so
            computed = function(
                params,
                *map(ctypes.c_int64, (rows, columns, blocks)),
                ctypes.c_void_p(self.weights.ctypes.data),
                ctypes.c_int64(blocks),
                ctypes.c_void_p(self.activations.ctypes.data),
                ctypes.c_int64(blocks),
                ctypes.c_void_p(result.ctypes.data),
                ctypes.c_int64(rows),
                *(self.kind.number, self.kind.activation_type, _F32),
            )
            if not computed:
                return None
        return result

    def dots(self, ggml: ctypes.CDLL) -> Floats:
        """The same, as ggml multiplies one row by one row."""
        (rows, blocks, _), columns = self.weights.shape, len(self.activations)
        result, dot = np.zeros((columns, rows), np.float32), getattr(ggml, self.kind.dot)
        none = ctypes.c_size_t(0)
        for column, row in np.ndindex(columns, rows):
            to, one, other = (
                ctypes.c_void_p(array.ctypes.data)
                for array in (result[column, row:], self.weights[row], self.activations[column])
            )
            dot(blocks * self.kind.values, to, none, one, none, other, none, 1)
        return result


def agrees(ggml: ctypes.CDLL, kind: WeightKind) -> bool:
    """Whether our products of this type are ggml's but for the order of their sums."""
    for size in _SIZES:
        factors = Factors.scrambled(ggml, kind, size)
        found, expected = factors.product(ggml.updraft_product), factors.dots(ggml)
        if found is None or not np.abs(found - expected).max() <= _TOLERANCE * np.abs(expected).max():
            return False
    return True


def _weights(kind: WeightKind, rows: int, blocks: int) -> Bytes:
    """Rows as they lie in memory, with scales and minima of about 0.1."""
    found = (scrambled(rows * blocks * kind.block_bytes) >> np.uint64(56)).astype(np.uint8)
    found = found.reshape(rows, blocks, kind.block_bytes)
    for place in kind.halves_at:
        found[:, :, place + 1] = found[:, :, place + 1] & 0x83 | 0x2C  # sign and mantissa stay
    return found


def _activations(ggml: ctypes.CDLL, kind: WeightKind, rows: int, blocks: int) -> Bytes:
    """Rows as ggml quantises them."""
    count = rows * blocks * kind.values
    values = (scrambled(2 * count)[count:] >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)
    found = np.zeros((rows, blocks, kind.activation_bytes), np.uint8)
    getattr(ggml, kind.quantizer)(
        ctypes.c_void_p(values.ctypes.data), ctypes.c_void_p(found.ctypes.data), ctypes.c_int64(count)
    )
    return found


def scrambled(count: int) -> npt.NDArray[np.uint64]:
    """Numbers without a pattern. By hand, for to import numpy's generators takes longer than all else here."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return mixed * np.uint64(0xBF58476D1CE4E5B9)


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("without_data", ctypes.c_bool))
