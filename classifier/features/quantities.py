"""Quantities in a question: the size of its numbers, and the lengths of its lists, quotes and repetitions."""

from __future__ import annotations

import re
from math import log1p

import numpy as np

from ..arrays import Array

_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_QUOTE = re.compile(r"[\"“”]")
_LARGEST = 300.0  # maximum number of digits, close to that of the largest float


def quantities(text: str) -> Array:
    """Return the quantity features of a normalised text, (len(QUANTITY_NAMES),) float32."""
    return np.array([*_measures(text).values()], np.float32)


def _measures(text: str) -> dict[str, float]:
    numbers = _NUMBER.findall(text)
    values = np.array(list(map(float, numbers)) or [0.0])
    magnitudes = np.minimum(np.log10(1.0 + values), _LARGEST)
    commas = text.count(",")
    quoted = [len(part) for part in _QUOTE.split(text)[1::2]]
    return {
        "largest_number": float(magnitudes.max()),
        "smallest_number": float(magnitudes.min()),
        "sum_of_magnitudes": float(magnitudes.sum()),
        "distinct_numbers": len(set(numbers)) / max(len(numbers), 1),
        "decimals": float("." in ",".join(numbers)),
        "mean_item": (len(text) - commas) / (commas + 1),
        "quotes": log1p(len(quoted)),
        "longest_quote": log1p(max(quoted, default=0)),
        "longest_repeat": log1p(_longest_repeat(text)),
    }


def _longest_repeat(text: str) -> int:
    """Return the length of the longest run of one character; 1 for an empty text."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    ends = np.flatnonzero(codes[1:] != codes[:-1])
    if not len(ends):
        return max(len(codes), 1)
    return int(max(ends[0] + 1, len(codes) - 1 - ends[-1], (ends[1:] - ends[:-1]).max(initial=0)))


QUANTITY_NAMES = (*_measures(""),)
