"""Check that the kernels in the loaded llama.cpp are right, and that llama.cpp calls them.

`updraft doctor` runs the check, and so does the first use of a build on a machine, in a subprocess.
"""

from __future__ import annotations

import ctypes

from . import attention_check
from .kernels import KernelsInUse
from .product_check import KINDS, InitParams, WeightKind, agrees

_MEMORY_BYTES = 1 << 24  # bytes for tensors, a graph and ggml's work memory
_ROWS, _COLUMNS = 16, 9  # nine columns, because ggml uses another code path for K-quants from eight on
_F32, _F16 = 0, 1  # values of enum ggml_type


def wrong_kernels(ggml: ctypes.CDLL, served: KernelsInUse) -> tuple[str, ...]:
    """Return the names of faulty kernels in use: their results differ from ggml's, or ggml never calls them."""
    kinds = [kind for kind in KINDS if kind.name in served.types]
    ggml.ggml_cpu_init()  # fills ggml's tables of half-precision numbers
    wrong = [kind.name for kind in kinds if not (agrees(ggml, kind) and _Graph(ggml).calls_product(kind))]
    if served.attention and not (attention_check.agrees(ggml) and _Graph(ggml).calls_attention()):
        wrong.append("attention")
    return tuple(wrong)


class _Graph:
    """A compute graph of one operation, which ggml computes in the same way as a model's graph."""

    def __init__(self, ggml: ctypes.CDLL) -> None:
        self._ggml = ggml
        for name in ("init", "new_tensor_2d", "new_tensor_4d", "set_zero", "mul_mat", "flash_attn_ext", "new_graph"):
            getattr(ggml, f"ggml_{name}").restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(ggml.ggml_init(InitParams(_MEMORY_BYTES, None, False)))

    def calls_product(self, kind: WeightKind) -> bool:
        width = 8 * kind.values  # long enough for Updraft's kernels
        weights = self._tensor(kind.number, width, _ROWS)
        operation = self._ggml.ggml_mul_mat(self._context, weights, self._tensor(_F32, width, _COLUMNS))
        return self._counted("updraft_products", operation)

    def calls_attention(self) -> bool:
        query, key, value = (self._tensor(kind, 64, 16) for kind in (_F32, _F16, _F16))
        numbers = ctypes.c_float(1), ctypes.c_float(0), ctypes.c_float(0)
        operation = self._ggml.ggml_flash_attn_ext(self._context, query, key, value, None, *numbers)
        return self._counted("updraft_attentions", operation)

    def _tensor(self, kind: int, width: int, rows: int) -> ctypes.c_void_p:
        tensor = self._ggml.ggml_new_tensor_2d(self._context, kind, ctypes.c_int64(width), ctypes.c_int64(rows))
        return ctypes.c_void_p(self._ggml.ggml_set_zero(ctypes.c_void_p(tensor)))

    def _counted(self, counter: str, operation: int) -> bool:
        """Compute `operation`; return whether Updraft's kernel computed it. Frees the graph."""
        counted = ctypes.c_int64.in_dll(self._ggml, counter)
        before = counted.value
        graph = ctypes.c_void_p(self._ggml.ggml_new_graph(self._context))
        self._ggml.ggml_build_forward_expand(graph, ctypes.c_void_p(operation))
        self._ggml.ggml_graph_compute_with_ctx(self._context, graph, 1)
        self._ggml.ggml_free(self._context)
        return counted.value > before
