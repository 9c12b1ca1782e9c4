"""What a folded text counts: words, numbers, characters and hashed n-grams, in C of ours or in numpy, to the last bit.

Work is done on code points. A decision waits for it, and in numpy it is some fifty calls, each longer than what it
computes (decision 049).
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.native_library import NativeBuildError, holding, load_from
from .views import Array

__all__ = ["COUNTS", "Tally", "Tallying", "hash_of"]

COUNTS = 8192

_Hashes = NDArray[np.uint32]
_Integers = NDArray[np.int64]

_SOURCES = Path(__file__).parent / "native"
_LONG_WORD = 8
_STRETCH = 4  # characters
_TOLD = 8  # the integers of a `Tally`, in its order
_BEYOND = 128  # stands for all code points outside ASCII
_ENCODING = f"utf-32-{sys.byteorder[0]}e"
_log = logging.getLogger("updraft.classifier")

# What a character is: 0 nothing that counts, 1 part of a word, 2 a digit. The last entry stands for all beyond ASCII.
_CLASS = np.array([2 if chr(c).isdigit() else int(chr(c).isalpha()) for c in range(_BEYOND)] + [1], np.uint8)
_CLASS.setflags(write=False)
# As many as a power of two, which makes the remainder cheap.
_POWERS = np.cumprod(np.full(64, 0x01000193, np.uint64)).astype(np.uint32)
_POWERS.setflags(write=False)
# 1 + log(n), and 0 for none; what is there more often than this counts as this often.
_DAMPED = np.concatenate(([0.0], 1.0 + np.log(np.arange(1, 1024)))).astype(np.float32)
_DAMPED.setflags(write=False)
_BLANK = np.array([32], np.uint32)
_BLANK.setflags(write=False)


@dataclass(frozen=True, slots=True)
class Tally:
    """Of words their number, letters, the longest, the long and the distinct ones; of numbers the first three.

    `characters`: (129,) by code point, all beyond ASCII last. `cues`: how often each of the words asked for is there.
    `counts`: (COUNTS,) float32, `1 + log(n)` of the n-grams in a bucket: words and word pairs in the first half, four
    characters in a row in the second. Digits read 0 there, so that they carry the phrasing and not the numbers.
    """

    characters: _Integers
    cues: _Integers
    counts: Array
    words: int
    word_letters: int
    longest_word: int
    long_words: int
    distinct_words: int
    numbers: int
    digits: int
    longest_number: int


class Tallying:
    """Tallies texts. Thread-safe."""

    def __init__(self, cues: Sequence[str], *, native: bool = True) -> None:
        """`cues`: words to count, in the order of their hashes. `native`: whether to look for the C, and to build it
        where nobody has."""
        self._cues = np.array([hash_of(cue) for cue in cues], np.uint32)
        self._native = _native() if native else None

    def of(self, text: str) -> Tally:
        return self._in_numpy(text) if self._native is None else self._in_c(self._native, text)

    def _in_c(self, function: Any, text: str) -> Tally:
        codes = text.encode(_ENCODING, "surrogatepass")
        counts, told = np.empty(COUNTS, np.float32), np.empty(_TOLD + _BEYOND + 1 + len(self._cues), np.int64)
        asked = (codes, len(codes) // 4, _tables(), self._cues.ctypes.data, len(self._cues))
        if function(*asked, counts.ctypes.data, told.ctypes.data):
            raise MemoryError("There is no memory to count a question's words.")
        characters, cues = told[_TOLD : _TOLD + _BEYOND + 1], told[_TOLD + _BEYOND + 1 :]
        return Tally(characters, cues, counts, *told[:_TOLD].tolist())

    def _in_numpy(self, text: str) -> Tally:
        codes = _code_points(text)
        places = np.minimum(codes, np.uint32(_BEYOND))
        classes = _CLASS.take(places)
        unnumbered = np.where(classes == 2, np.uint32(ord("0")), codes)
        hashes, lengths, found = _tokens(unnumbered, classes)
        ordered, words, numbers = np.sort(hashes[found == 1]), lengths[found == 1], lengths[found == 2]
        pairs = hashes[:-1] * np.uint32(0x9E3779B1) + hashes[1:]
        padded = np.concatenate((_BLANK, unnumbered, _BLANK))
        return Tally(
            np.bincount(places, minlength=_BEYOND + 1),
            ordered.searchsorted(self._cues, "right") - ordered.searchsorted(self._cues, "left"),
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
    """Of a word of letters."""
    return int(_tokens(_code_points(word), np.ones(len(word), np.uint8))[0][0])


def _tokens(codes: _Hashes, classes: NDArray[np.uint8]) -> tuple[_Hashes, _Integers, NDArray[np.uint8]]:
    """The words (class 1) and numbers (class 2) of a text in order: hash, length and class of each."""
    if not len(codes):
        return codes, np.empty(0, np.int64), classes
    bounds = np.concatenate(((0,), np.flatnonzero(classes[1:] != classes[:-1]) + 1, (len(codes),)))
    starts, lengths = bounds[:-1], bounds[1:] - bounds[:-1]
    place = np.arange(len(codes)) - np.repeat(starts, lengths)
    terms = (codes + np.uint32(1)) * _POWERS.take(place & (len(_POWERS) - 1))
    found = classes[starts]
    kept = found > 0
    return np.add.reduceat(terms, starts, dtype=np.uint32)[kept], lengths[kept], found[kept]


def _code_points(text: str) -> _Hashes:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint32)


def _stretches(codes: _Hashes) -> _Hashes:
    """A hash of every few code points in a row."""
    rolling = codes
    for order in range(1, _STRETCH):
        rolling = rolling[:-1] * np.uint32(0x01000193) + codes[order:]
    return rolling ^ np.uint32(_STRETCH * 0x2545F491 & 0xFFFFFFFF)


def _mixed(hashes: _Hashes) -> _Hashes:
    """Every bit of a hash made to depend on every other (the finaliser of MurmurHash3)."""
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


@cache
def _tables() -> bytes:
    """What `native/tally.c` looks up: `Tables`, with the padding that C puts before numbers of four bytes."""
    classes = _CLASS.tobytes()
    return classes.ljust(-(-len(classes) // 4) * 4, b"\0") + _POWERS.tobytes() + _DAMPED.tobytes()


@cache
def _native() -> Any:
    """The function of the C; None where that cannot be built, which is logged."""
    try:
        function = load_from(_SOURCES).updraft_tally
    except NativeBuildError as error:
        _log.info("Words are counted in numpy, not in C: %s", error)
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = (ctypes.c_char_p, number, ctypes.c_char_p, address, number, address, address)
    function.restype = ctypes.c_int
    return holding(function)
