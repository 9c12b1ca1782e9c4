"""Check of Updraft's matrix products in llama.cpp, and the list of weight types that the products support."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_F32 = 0  # value of enum ggml_type
_SIZES = ((16, 1, 9), (18, 3, 8), (17, 18, 8))  # (weight rows, activation rows, blocks) with full and partial tiles
_TOLERANCE = 1e-5  # maximum error relative to the largest result; another summation order causes a tenth of this
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class WeightKind:
    """A type of quantized weights, as defined by ggml."""

    name: str
    # Value of `enum ggml_type`.
    number: int
    # Values per block.
    values: int
    block_bytes: int
    # Byte offsets of the half-precision numbers (scales and minima) in a block.
    halves_at: tuple[int, ...]
    # ggml type that activations are quantized to; `activation_bytes` is the size of its blocks.
    activation_type: int
    activation_bytes: int
    # ggml's function that quantizes activations.
    quantizer: str
    # ggml's function that computes the dot product of two rows.
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
    """Quantized weights and activations in ggml's memory layout, two arrays of shape (rows, blocks, bytes)."""

    kind: WeightKind
    weights: Bytes
    activations: Bytes

    @classmethod
    def scrambled(cls, ggml: ctypes.CDLL, kind: WeightKind, size: tuple[int, int, int]) -> Factors:
        """Return pseudo-random factors. `size`: rows of weights, rows of activations, blocks per row."""
        rows, columns, blocks = size
        return cls(kind, _weights(kind, rows, blocks), _activations(ggml, kind, columns, blocks))

    def product(self, function: Any, threads: int = 2) -> Floats | None:
        """Return the product (activation rows, weight rows) that `function` computes; None if `function` does not
        support the product. `function` has the interface of llama.cpp's `llamafile_sgemm`."""
        (rows, blocks, _), columns = self.weights.shape, len(self.activations)
        result = np.zeros((columns, rows), np.float32)
        function.restype = ctypes.c_bool
        for thread in range(threads):
            params = (ctypes.c_int * 16)(thread, threads)  # ggml_compute_params begins with these two numbers
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
        """Compute the product with ggml, one pair of rows at a time."""
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
    """Return whether Updraft's kernel computes the same products as ggml, except for rounding."""
    for size in _SIZES:
        factors = Factors.scrambled(ggml, kind, size)
        product, expected = factors.product(ggml.updraft_product), factors.dots(ggml)
        if product is None or not np.abs(product - expected).max() <= _TOLERANCE * np.abs(expected).max():
            return False
    return True


def _weights(kind: WeightKind, rows: int, blocks: int) -> Bytes:
    """Return pseudo-random rows of quantized weights in ggml's memory layout, with scales and minima of about 0.1."""
    weights = (scrambled(rows * blocks * kind.block_bytes) >> np.uint64(56)).astype(np.uint8)
    weights = weights.reshape(rows, blocks, kind.block_bytes)
    for place in kind.halves_at:
        weights[:, :, place + 1] = weights[:, :, place + 1] & 0x83 | 0x2C  # this exponent gives about 0.1
    return weights


def _activations(ggml: ctypes.CDLL, kind: WeightKind, rows: int, blocks: int) -> Bytes:
    """Return pseudo-random rows of activations, quantized by ggml."""
    count = rows * blocks * kind.values
    values = (scrambled(2 * count)[count:] >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)
    quantized = np.zeros((rows, blocks, kind.activation_bytes), np.uint8)
    getattr(ggml, kind.quantizer)(
        ctypes.c_void_p(values.ctypes.data), ctypes.c_void_p(quantized.ctypes.data), ctypes.c_int64(count)
    )
    return quantized


def scrambled(count: int) -> npt.NDArray[np.uint64]:
    """Return pseudo-random numbers. Importing numpy's generators would take longer than the whole check."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return mixed * np.uint64(0xBF58476D1CE4E5B9)


class InitParams(ctypes.Structure):
    """C struct `ggml_init_params`."""

    _fields_ = (("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("without_data", ctypes.c_bool))
