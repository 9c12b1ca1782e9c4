"""One pass over the raw logits of a step gives what is said of every token chosen in it: in C, or in numpy."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...kernels.native_library import NativeBuildError, holding, load_from
from .signals import Floats, Measured

_SOURCES = Path(__file__).parents[1] / "llama" / "native" / "signals"
_COLUMNS = 4  # token, log_total, entropy, margin
_AT_ONCE = 2**17  # logits: half a megabyte
_LEAST = np.float32(-1e4)  # stands for -inf, of which 0 * log 0 would make NaN
_log = logging.getLogger("updraft.local")

Table = npt.NDArray[np.float64]


class SignalMeter:
    """Measures rows of `vocab_size` logits; they stay as they are.

    C of ours (`native/signals`) takes a fifth of numpy's time, which every token would wait for (decision 038). Where
    it cannot be built, numpy computes the same.
    """

    def __init__(self, vocab_size: int, *, native: bool = True) -> None:
        """`native`: whether to look for the C."""
        self._function = _native() if native else None
        self._plain = _Plain(vocab_size) if self._function is None else None

    def measure(self, logits: Floats) -> list[Measured]:
        """`logits`: (n, vocab), any n."""
        table = self._table(np.ascontiguousarray(logits))
        return [
            Measured(row, int(token), *numbers) for row, (token, *numbers) in zip(logits, table.tolist(), strict=True)
        ]

    def _table(self, logits: Floats) -> Table:
        if self._plain is not None:
            return self._plain.measure(logits)
        assert self._function is not None
        table = np.empty((len(logits), _COLUMNS))
        rows, vocab_size = logits.shape
        self._function(logits.ctypes.data, rows, vocab_size, table.ctypes.data)
        return table


class _Plain:
    """In numpy, as many rows at once as fit a processor's cache: more are not faster then."""

    def __init__(self, vocab_size: int) -> None:
        self._rows = max(1, _AT_ONCE // vocab_size)
        self._shifted = np.empty((self._rows, vocab_size), np.float32)
        self._weights = np.empty((self._rows, vocab_size), np.float32)

    def measure(self, logits: Floats) -> Table:
        parts = [self._measure(logits[start : start + self._rows]) for start in range(0, len(logits), self._rows)]
        return np.concatenate(parts)

    def _measure(self, logits: Floats) -> Table:
        """Entropy is log Z - sum(p * (x - max)), with log Z of the shifted logits x - max."""
        count = len(logits)
        shifted, weights, every = self._shifted[:count], self._weights[:count], np.arange(count)
        places = logits.argmax(axis=1)
        best = logits[every, places]
        np.subtract(logits, best[:, None], out=shifted)
        shifted[every, places] = -np.inf
        margins = -shifted.max(axis=1) if logits.shape[1] > 1 else np.full(count, np.inf, np.float32)
        shifted[every, places] = 0
        np.exp(shifted, out=weights)
        totals = weights.sum(axis=1)
        products = np.einsum("ij,ij->i", weights, shifted)
        if np.isnan(products).any():
            products = np.einsum("ij,ij->i", weights, np.maximum(shifted, _LEAST, out=shifted))
        log_totals = np.log(totals)
        return np.stack((places, best + log_totals, log_totals - products / totals, margins), axis=1, dtype=np.float64)


def _native() -> Callable[[int, int, int, int], None] | None:
    """The function of the C; None where that cannot be built, which is logged."""
    try:
        function = load_from(_SOURCES).updraft_measure
    except NativeBuildError as error:
        _log.info("Signals are measured in numpy, not in C: %s", error)
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    function.restype = None
    return holding(function)
