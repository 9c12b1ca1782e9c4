"""What the gates of a pair with hidden states read of a question: measures of its wording and quantities, and n-grams.

All of it is taken from the normalised text, so that neither casing nor blanks can change a decision.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import log1p

import numpy as np

from ..arrays import Array
from .wording import MEASURE_NAMES

__all__ = ["NGRAM_WIDTH", "STRUCTURE_NAMES", "ngrams", "structure"]

NGRAM_WIDTH = 1024

_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_QUOTE = re.compile(r"[\"“”]")
_LARGEST = 300.0  # digits: a float holds hardly more


def ngrams(counts: Array) -> Array:
    """(NGRAM_WIDTH,) float32 from the counts of `wording`: words and word pairs in the first half, four characters in a
    row in the second, each half of unit length (or zero).
    """
    halves = counts.reshape(2, -1, NGRAM_WIDTH // 2).sum(axis=1)
    lengths = np.sqrt((halves * halves).sum(axis=1, keepdims=True))
    return (halves / np.where(lengths > 0, lengths, 1)).ravel()


def structure(text: str, measures: Array) -> Array:
    """(len(STRUCTURE_NAMES),) float32 of a normalised text and the measures of its wording."""
    return np.concatenate((measures, np.array(_quantities(text), np.float32)))


def _quantities(text: str) -> Sequence[float]:
    """How large its numbers are, and how long what it lists, quotes and repeats."""
    numbers = _NUMBER.findall(text)
    values = np.array(list(map(float, numbers)) or [0.0])
    magnitudes = np.minimum(np.log10(1.0 + values), _LARGEST)
    commas = text.count(",")
    quoted = [len(part) for part in _QUOTE.split(text)[1::2]]
    return (
        float(magnitudes.max()),
        float(magnitudes.min()),
        float(magnitudes.sum()),
        len(set(numbers)) / max(len(numbers), 1),
        float(any("." in number for number in numbers)),
        (len(text) - commas) / (commas + 1),
        log1p(len(quoted)),
        log1p(max(quoted, default=0)),
        log1p(_longest_repeat(text)),
    )


def _longest_repeat(text: str) -> int:
    """The length of the longest run of one character; 1 of a text without any."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    ends = np.flatnonzero(codes[1:] != codes[:-1])
    if not len(ends):
        return max(len(codes), 1)
    return int(max(ends[0] + 1, len(codes) - 1 - ends[-1], (ends[1:] - ends[:-1]).max(initial=0)))


STRUCTURE_NAMES = (
    *MEASURE_NAMES,
    *("largest_number", "smallest_number", "sum_of_magnitudes", "distinct_numbers", "decimals"),
    *("mean_item", "quotes", "longest_quote", "longest_repeat"),
)
