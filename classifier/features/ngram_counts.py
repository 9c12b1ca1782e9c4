"""Counts over a normalised text: words, numbers, characters and hashed n-grams, vectorised with numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array

COUNTS = 8192

_Hashes = NDArray[np.uint32]
_Integers = NDArray[np.int64]

_LONG_WORD = 8
_STRETCH = 4  # characters in a character n-gram
_BEYOND = 128  # index for all code points outside ASCII

# Class of each character: 0 other, 1 letter, 2 digit. The last entry stands for all characters outside ASCII.
_CLASS = np.array([2 if chr(c).isdigit() else int(chr(c).isalpha()) for c in range(_BEYOND)] + [1], np.uint8)
_CLASS.setflags(write=False)
# Powers of the FNV prime. Their number is a power of two, so that an index wraps around with one bit operation.
_POWERS = np.cumprod(np.full(64, 0x01000193, np.uint64)).astype(np.uint32)
_POWERS.setflags(write=False)
# Damped counts, by count n: 1 + log(n), or 0 for n = 0. Counts above the last index are clipped to it.
_DAMPED = np.concatenate(([0.0], 1.0 + np.log(np.arange(1, 1024)))).astype(np.float32)
_DAMPED.setflags(write=False)
_BLANK = np.array([32], np.uint32)
_BLANK.setflags(write=False)


@dataclass(frozen=True, slots=True)
class TextCounts:
    """Counts over one normalised text."""

    # (129,) occurrences of each ASCII character; the last entry counts all other characters.
    characters: _Integers
    # (cues,) occurrences of each cue word, such as "why", "total" or "code".
    cues: _Integers
    # (COUNTS,) float32, damped counts of the n-grams in each hash bucket: words and word pairs in the first half, runs
    # of four characters in the second. Digits are read as 0, so that n-grams carry the phrasing and not the numbers.
    ngrams: Array
    # Words: their number, total letters, longest length, number with more than eight letters, number of distinct words.
    words: int
    word_letters: int
    longest_word: int
    long_words: int
    distinct_words: int
    # Numbers in the text: how many, their total digits, and the digits of the longest.
    numbers: int
    digits: int
    longest_number: int


def count_text(text: str, cues: NDArray[np.uint32]) -> TextCounts:
    """Return the counts over `text`. `cues`: (n,) sorted hashes of the cue words, from `hash_of`."""
    codes = _code_points(text)
    places = np.minimum(codes, np.uint32(_BEYOND))
    classes = _CLASS.take(places)
    unnumbered = np.where(classes == 2, np.uint32(ord("0")), codes)
    hashes, lengths, kinds = _tokens(unnumbered, classes)
    ordered, words, numbers = np.sort(hashes[kinds == 1]), lengths[kinds == 1], lengths[kinds == 2]
    pairs = hashes[:-1] * np.uint32(0x9E3779B1) + hashes[1:]
    padded = np.concatenate((_BLANK, unnumbered, _BLANK))
    return TextCounts(
        np.bincount(places, minlength=_BEYOND + 1),
        ordered.searchsorted(cues, "right") - ordered.searchsorted(cues, "left"),
        _counts(np.concatenate((hashes, pairs)), _stretches(padded)),
        len(words),
        int(words.sum()),
        int(words.max(initial=0)),
        int(np.count_nonzero(words > _LONG_WORD)),
        int(np.count_nonzero(ordered[1:] != ordered[:-1])) + min(len(ordered), 1),
        len(numbers),
        int(numbers.sum()),
        int(numbers.max(initial=0)),
    )


def hash_of(word: str) -> int:
    """Return the hash of a word that consists of letters."""
    return int(_tokens(_code_points(word), np.ones(len(word), np.uint8))[0][0])


def _tokens(codes: _Hashes, classes: NDArray[np.uint8]) -> tuple[_Hashes, _Integers, NDArray[np.uint8]]:
    """Return the hash, length and class of each word (class 1) and number (class 2), in text order."""
    if not len(codes):
        return codes, np.empty(0, np.int64), classes
    bounds = np.concatenate(((0,), np.flatnonzero(classes[1:] != classes[:-1]) + 1, (len(codes),)))
    starts, lengths = bounds[:-1], bounds[1:] - bounds[:-1]
    place = np.arange(len(codes)) - np.repeat(starts, lengths)
    terms = (codes + np.uint32(1)) * _POWERS.take(place & (len(_POWERS) - 1))
    kinds = classes[starts]
    nonempty = kinds > 0
    return np.add.reduceat(terms, starts, dtype=np.uint32)[nonempty], lengths[nonempty], kinds[nonempty]


def _code_points(text: str) -> _Hashes:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint32)


def _stretches(codes: _Hashes) -> _Hashes:
    """Return a hash of every run of `_STRETCH` code points."""
    rolling = codes
    for order in range(1, _STRETCH):
        rolling = rolling[:-1] * np.uint32(0x01000193) + codes[order:]
    return rolling ^ np.uint32(_STRETCH * 0x2545F491 & 0xFFFFFFFF)


def _mixed(hashes: _Hashes) -> _Hashes:
    """Mix the bits of each hash, so that every bit depends on every other (the finaliser of MurmurHash3)."""
    spread = hashes ^ (hashes >> np.uint32(16))
    spread *= np.uint32(0x85EBCA6B)
    spread ^= spread >> np.uint32(13)
    spread *= np.uint32(0xC2B2AE35)
    spread ^= spread >> np.uint32(16)
    return spread


def _counts(words: _Hashes, characters: _Hashes) -> Array:
    half = COUNTS // 2
    places = _mixed(np.concatenate((words, characters))) & np.uint32(half - 1)
    places[len(words) :] += np.uint32(half)
    return _DAMPED.take(np.bincount(places, minlength=COUNTS), mode="clip")
