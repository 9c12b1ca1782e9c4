"""Check of Updraft's attention kernel in llama.cpp."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .product_check import InitParams, scrambled

_F32, _F16 = 0, 1  # values of enum ggml_type
_TOLERANCE = 1e-5
_OVERHEAD = 1 << 14  # bytes of tensor metadata
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Inputs of an attention operation."""

    # Queries, of shape (streams, heads, rows, values); a stream is a separate part of the KV cache.
    query: Floats
    # Keys of cached tokens, one token per cell: (streams, key heads, cells, values). `value` has the same shape.
    key: Halves
    value: Halves
    # Numbers that are added to the attention scores, of shape (1 or streams, rows, cells).
    mask: Halves | None

    def expected(self) -> Floats:
        """Compute attention by its definition in double precision; return an array (streams, rows, heads, values)."""
        together = self.query.shape[1] // self.key.shape[1]
        key, value = (np.repeat(array.astype(np.float64), together, axis=1) for array in (self.key, self.value))
        scores = self.query.astype(np.float64) @ key.swapaxes(2, 3) * self.scale
        if self.mask is not None:
            scores += self.mask.astype(np.float64)[:, None]
        largest = scores.max(axis=3, keepdims=True)
        weights = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
        totals = weights.sum(axis=3, keepdims=True)
        mixed = (weights / np.where(totals > 0, totals, 1)) @ value
        return mixed.swapaxes(1, 2).astype(np.float32)

    @property
    def scale(self) -> float:
        return self.query.shape[3] ** -0.5

    def computed(self, ggml: ctypes.CDLL, threads: int = 2) -> Floats | None:
        """Return the result of Updraft's kernel, called per thread number; None if it does not support these inputs."""
        for name in ("ggml_init", "ggml_new_tensor_4d", "ggml_flash_attn_ext", "ggml_get_data"):
            getattr(ggml, name).restype = ctypes.c_void_p
        arrays = self.query, self.key, self.value, None if self.mask is None else self.mask[:, None]
        memory_bytes = self.query.nbytes + sum(0 if array is None else array.nbytes for array in arrays) + _OVERHEAD
        context = ctypes.c_void_p(ggml.ggml_init(InitParams(memory_bytes, None, False)))
        tensors = (_tensor(ggml, context, array) for array in arrays)
        numbers = ctypes.c_float(self.scale), ctypes.c_float(0), ctypes.c_float(0)
        result = ctypes.c_void_p(ggml.ggml_flash_attn_ext(context, *tensors, *numbers))
        function = ggml.updraft_attention
        function.restype = ctypes.c_bool
        params = [(ctypes.c_int * 16)(thread, threads) for thread in range(threads)]  # begins like ggml_compute_params
        output = all(function(settings, result) for settings in params) or None
        if output:
            streams, heads, rows, values = self.query.shape
            output = np.zeros((streams, rows, heads, values), np.float32)
            ctypes.memmove(output.ctypes.data, ggml.ggml_get_data(result), output.nbytes)
        ggml.ggml_free(context)
        return output


def agrees(ggml: ctypes.CDLL) -> bool:
    """Return whether the kernel matches the definition of attention on a sample that includes a fully masked row."""
    case = _sample()
    output = case.computed(ggml)
    return output is not None and bool(np.abs(output - case.expected()).max() <= _TOLERANCE)


def _sample() -> AttentionCase:
    heads, key_heads, rows, cells, values = 6, 2, 7, 150, 32
    numbers = (scrambled(2 * heads * cells * values) >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - 1
    query = numbers[: heads * rows * values].reshape(1, heads, rows, values)
    key, value = numbers.astype(np.float16)[-2 * key_heads * cells * values :].reshape(2, 1, key_heads, cells, values)
    visible = np.tri(rows, cells, cells - rows - 3, dtype=np.bool_)  # each row sees one cell more than the row before
    visible[4:6] = np.arange(cells) % 3 == 1, np.arange(cells) > 90
    visible[6] = False
    return AttentionCase(query * 8, key, value, np.where(visible, 0, -np.inf).astype(np.float16)[None])


def _tensor(ggml: ctypes.CDLL, context: ctypes.c_void_p, array: Floats | Halves | None) -> ctypes.c_void_p | None:
    if array is None:
        return None
    kind = _F32 if array.dtype == np.float32 else _F16
    sizes = map(ctypes.c_int64, reversed(array.shape))
    tensor = ctypes.c_void_p(ggml.ggml_new_tensor_4d(context, kind, *sizes))
    ctypes.memmove(ggml.ggml_get_data(tensor), np.ascontiguousarray(array).ctypes.data, array.nbytes)
    return tensor
