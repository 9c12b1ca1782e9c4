"""Token signals from raw logits: the most likely token, the log normalizer, entropy and margin of each row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .signals import Floats, RowMeasure

_BLOCK_LOGITS = 2**17  # number of logits processed at once: half a megabyte, which fits a processor's cache
_MIN_LOGIT = np.float32(-1e4)  # replaces -inf, because 0 * -inf is NaN

Table = npt.NDArray[np.float64]


class SignalMeter:
    """Measures rows of `vocab_size` logits, as many at once as fit a processor's cache. Does not change the rows."""

    def __init__(self, vocab_size: int) -> None:
        self._rows = max(1, _BLOCK_LOGITS // vocab_size)
        self._shifted = np.empty((self._rows, vocab_size), np.float32)
        self._weights = np.empty((self._rows, vocab_size), np.float32)

    def measure(self, logits: Floats) -> list[RowMeasure]:
        """Measure the rows of `logits` (n, vocab)."""
        with np.errstate(invalid="ignore"):  # no warnings, because `RowMeasure.is_finite` reports NaN and infinity
            parts = [self._table(logits[start : start + self._rows]) for start in range(0, len(logits), self._rows)]
        numbers = [row for part in parts for row in part.tolist()]
        return [RowMeasure(row, int(token), *rest) for row, (token, *rest) in zip(logits, numbers, strict=True)]

    def _table(self, logits: Floats) -> Table:
        """Return a table with the columns token, log_total, entropy, margin.

        Entropy is log Z - sum(p * (x - max)), where Z is the normalizer of the shifted logits x - max.
        """
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
            products = np.einsum("ij,ij->i", weights, np.maximum(shifted, _MIN_LOGIT, out=shifted))
        log_totals = np.log(totals)
        return np.stack((places, best + log_totals, log_totals - products / totals, margins), axis=1, dtype=np.float64)
