"""Features of the question's text: hashed n-grams for its wording and plain measures of its structure.

The hash is our own: no vectoriser has to be exported, and the values never depend on Python's randomised `hash`.
"""

from __future__ import annotations

import re
import zlib
from math import log1p, log10

import numpy as np
from numpy.typing import NDArray

from .views import Array, PromptView

NGRAM_WIDTH = 1024

_WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_DIGIT = re.compile(r"\d")
_QUOTE = re.compile(r"[\"“”]")
_CHAR_ORDERS = (3, 4, 5)
_QUESTION_WORDS = ("what", "which", "who", "when", "where", "why", "how", "many", "much", "not", "then", "than", "if")
_MARKS = ("+", "-", "*", "/", "=", "<", ">", "%", "(", "[", "{", ":", ";", ",", ".", "?", "!", "\n", "`", "_", "#", "$")


# By code point: neither letter, digit nor everyday punctuation; the last entry stands for everything outside ASCII.
_UNUSUAL = np.array(
    [chr(code).lower() not in "abcdefghijklmnopqrstuvwxyz0123456789 .,?!':;()+-*/=\n" for code in range(129)]
)
_UNUSUAL.setflags(write=False)


def code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint32)


def ngrams(text: str) -> Array:
    """(NGRAM_WIDTH,) float32: the first half words and word pairs, the second half character 3- to 5-grams.

    Signed hashing, each half of unit length (or zero). Case is folded and every digit reads 0, so the features carry
    the phrasing of a question and not the particular numbers in it.
    """
    folded = _DIGIT.sub("0", text.lower())
    out = np.empty(NGRAM_WIDTH, np.float32)
    half = NGRAM_WIDTH // 2
    out[:half] = _hashed(_word_hashes(folded), half)
    out[half:] = _hashed(char_hashes(code_points(f" {folded} ")), half)
    return out


def _word_hashes(text: str) -> NDArray[np.uint32]:
    words = np.array([zlib.crc32(w.encode("utf-8", "surrogatepass")) for w in _WORD.findall(text)], np.uint32)
    pairs = words[:-1] * np.uint32(0x9E3779B1) + words[1:]
    return np.concatenate((words, pairs))


def char_hashes(codes: NDArray[np.uint32], orders: tuple[int, ...] = _CHAR_ORDERS) -> NDArray[np.uint32]:
    """A hash of every stretch of the code points that is as long as one of `orders`, which rise."""
    grams: list[NDArray[np.uint32]] = []
    rolling = codes
    for order in range(2, orders[-1] + 1):
        rolling = rolling[:-1] * np.uint32(0x01000193) + codes[order - 1 :]
        if order in orders:
            grams.append(rolling ^ np.uint32(order * 0x2545F491 & 0xFFFFFFFF))
        if len(rolling) < 2:
            break
    return np.concatenate(grams) if grams else np.empty(0, np.uint32)


def mixed(hashes: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Every bit of a hash made to depend on every other (the finaliser of MurmurHash3)."""
    spread = hashes ^ (hashes >> np.uint32(16))
    spread *= np.uint32(0x85EBCA6B)
    spread ^= spread >> np.uint32(13)
    spread *= np.uint32(0xC2B2AE35)
    spread ^= spread >> np.uint32(16)
    return spread


def _hashed(hashes: NDArray[np.uint32], width: int) -> Array:
    """Signed counts of `hashes` in `width` buckets (a power of two), scaled to unit length."""
    spread = mixed(hashes)
    signs = np.where(spread >> np.uint32(31), 1.0, -1.0)
    counts = np.bincount(spread & np.uint32(width - 1), weights=signs, minlength=width)
    length = float(np.sqrt(counts @ counts))
    return (counts / length if length else counts).astype(np.float32)


def _magnitude(number: str) -> float:
    """Roughly log10(1 + number), from the text alone so that a number of any length is fine."""
    whole, _, _ = number.partition(".")
    lead = float(whole[:15]) if whole else 0.0
    return log10(1.0 + lead) + max(0, len(whole) - 15)


def _longest_repeat(codes: NDArray[np.uint32]) -> int:
    """The length of the longest run of one character."""
    if not len(codes):
        return 0
    starts = np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1])))
    return int(np.diff(np.append(starts, len(codes))).max())


def _rate(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def structure(prompt: PromptView) -> Array:
    """(len(STRUCTURE_NAMES),) float32: lengths, numbers, lists, question words, marks and unusual characters."""
    text = prompt.text
    lower = text.lower()
    words = _WORD.findall(lower)
    letters = [word for word in words if word[0].isalpha()]
    lengths = [len(word) for word in letters]
    numbers = _NUMBER.findall(text)
    magnitudes = [_magnitude(number) for number in numbers]
    digits = sum(len(number) for number in numbers)
    items = [part.strip() for part in text.split(",")]
    quoted = [len(part) for part in _QUOTE.split(text)[1::2]]
    codes = code_points(text)
    asked = set(letters)
    values = [
        log1p(len(text)),
        log1p(len(words)),
        log1p(prompt.n_messages),
        log1p(max(prompt.total_chars, len(text))),
        _rate(sum(lengths), len(lengths)),
        log1p(max(lengths, default=0)),
        _rate(len(asked), len(letters)),
        log1p(digits),
        _rate(digits, len(text)),
        log1p(len(numbers)),
        max(magnitudes, default=0.0),
        min(magnitudes, default=0.0),
        sum(magnitudes),
        _rate(len(set(numbers)), len(numbers)),
        float(any("." in number for number in numbers)),
        log1p(len(items) - 1),
        _rate(sum(map(len, items)), len(items)),
        log1p(len(quoted)),
        log1p(max(quoted, default=0)),
        log1p(_longest_repeat(codes)),
        _rate(int(((codes >= ord("A")) & (codes <= ord("Z"))).sum()), len(text)),
        _rate(int(_UNUSUAL[np.minimum(codes, 128)].sum()), len(text)),
        _rate(int((codes > 127).sum()), len(text)),
        log1p(text.count("\n")),
        *(float(word in asked) for word in _QUESTION_WORDS),
        *(log1p(text.count(mark)) for mark in _MARKS),
    ]
    return np.array(values, np.float32)


STRUCTURE_NAMES = (
    "chars",
    "words",
    "messages",
    "total_chars",
    "mean_word",
    "longest_word",
    "distinct_words",
    "digits",
    "digit_share",
    "numbers",
    "largest_number",
    "smallest_number",
    "sum_of_magnitudes",
    "distinct_numbers",
    "decimals",
    "list_items",
    "mean_item",
    "quotes",
    "longest_quote",
    "longest_repeat",
    "upper_share",
    "unusual_share",
    "non_ascii_share",
    "lines",
    *(f"asks_{word}" for word in _QUESTION_WORDS),
    *(f"count_{ord(mark):02x}" for mark in _MARKS),
)
