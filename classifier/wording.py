"""The wording of a question as numbers, for policies trained on graded text: cheap measures and hashed n-gram counts.

One function serves training and inference. Case and runs of white space are folded away before anything is counted,
so that neither can change a decision; a typo changes a few n-grams of hundreds. Work is done on arrays of code points,
which keeps a question of 2,000 characters well under half a millisecond.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import log1p

import numpy as np
from numpy.typing import NDArray

from .text_features import char_hashes, code_points, mixed
from .views import Array

__all__ = ["COUNTS", "MEASURE_NAMES", "WORDING_VERSION", "folded", "wording"]

# Raise it with every change that alters any feature of any input: a policy refuses features it was not trained on.
WORDING_VERSION = 1
COUNTS = 8192

_Hashes = NDArray[np.uint32]

_OPTION = re.compile(r"\(?(?:[a-j]|\d\d?)[.):] (.*)")
_QUANTITY = re.compile(r"[-+$£€]?[\d.,/^%]+(?: ?\S{1,3})?")
_LONG_WORD = 8
_CHAR_ORDERS = (4,)
_MOST_OPTIONS = 12
# As many as a power of two, which makes the remainder cheap.
_POWERS = np.cumprod(np.full(64, 0x01000193, np.uint64)).astype(np.uint32)
_POWERS.setflags(write=False)

# 1 + log(n), and 0 for none; what is there more often than this counts as this often.
_DAMPED = np.concatenate(([0.0], 1.0 + np.log(np.arange(1, 1024)))).astype(np.float32)
_DAMPED.setflags(write=False)

_BLANK = np.array([32], np.uint32)
_BLANK.setflags(write=False)

_MARKS = "+-*/=<>%()[]{}:;,.?!\n`_#$^\\|'\""
_MARK_CODES = np.array([ord(mark) for mark in _MARKS])
_MARK_CODES.setflags(write=False)
_CUES = (
    *("what", "which", "who", "when", "where", "why", "how", "many", "much", "if", "then", "than"),
    *("not", "except", "never", "true", "false", "following", "statement", "best", "most", "least", "likely"),
    *("according", "find", "calculate", "evaluate", "determine", "you", "i", "he", "she", "his", "her", "they"),
    *("total", "each", "per", "every", "more", "less", "fewer", "half", "twice", "times", "percent", "left", "rest"),
    *("the", "of", "a", "is", "write", "code", "explain"),
)

# What a character is: 0 nothing that counts, 1 part of a word, 2 a digit. The last entry stands for all beyond ASCII.
_CLASS = np.array([2 if chr(c).isdigit() else int(chr(c).isalpha()) for c in range(128)] + [1], np.uint8)
_CLASS.setflags(write=False)


def folded(text: str) -> str:
    """`text` in lower case, each run of blanks one space, each run of line breaks one, nothing at the ends."""
    lines = (" ".join(line.split()) for line in text.lower().splitlines())
    return "\n".join(line for line in lines if line)


def wording(question: str) -> tuple[Array, Array]:
    """The measures, (len(MEASURE_NAMES),) float32, and the counts, (COUNTS,) float32, of a question.

    A count is `1 + log(n)` of the n-grams in a bucket: words and word pairs in the first half, four characters in a row
    in the second. Digits read 0 there, so that they carry the phrasing and not the particular numbers.
    """
    text = folded(question)
    codes = code_points(text)
    ascii_codes = np.minimum(codes, np.uint32(128))
    classes = _CLASS.take(ascii_codes)
    unnumbered = np.where(classes == 2, np.uint32(ord("0")), codes)
    tokens = _tokens(unnumbered, classes)
    measures = np.concatenate((_sizes(text, ascii_codes, tokens), _options(text)))
    pairs = tokens.hashes[:-1] * np.uint32(0x9E3779B1) + tokens.hashes[1:]
    padded = np.concatenate((_BLANK, unnumbered, _BLANK))
    return measures, _counts(np.concatenate((tokens.hashes, pairs)), char_hashes(padded, _CHAR_ORDERS))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The words (class 1) and numbers (class 2) of a text in order: hash, length and class of each."""

    hashes: _Hashes
    lengths: NDArray[np.int64]
    classes: NDArray[np.uint8]


def _tokens(codes: _Hashes, classes: NDArray[np.uint8]) -> _Tokens:
    if not len(codes):
        return _Tokens(codes, np.empty(0, np.int64), classes)
    bounds = np.concatenate(((0,), np.flatnonzero(classes[1:] != classes[:-1]) + 1, (len(codes),)))
    starts, lengths = bounds[:-1], bounds[1:] - bounds[:-1]
    place = np.arange(len(codes)) - np.repeat(starts, lengths)
    terms = (codes + np.uint32(1)) * _POWERS.take(place & (len(_POWERS) - 1))
    found = classes[starts]
    kept = found > 0
    return _Tokens(np.add.reduceat(terms, starts, dtype=np.uint32)[kept], lengths[kept], found[kept])


def _counts(words: _Hashes, characters: _Hashes) -> Array:
    half = COUNTS // 2
    places = mixed(np.concatenate((words, characters))) & np.uint32(half - 1)
    places[len(words) :] += np.uint32(half)
    return _DAMPED.take(np.bincount(places, minlength=COUNTS), mode="clip")


def _hash_of(word: str) -> int:
    return int(_tokens(code_points(word), np.ones(len(word), np.uint8)).hashes[0])


_CUE_HASHES = np.sort(np.array([_hash_of(cue) for cue in _CUES], np.uint32))
_CUE_HASHES.setflags(write=False)


def _sizes(text: str, ascii_codes: _Hashes, tokens: _Tokens) -> Array:
    """Lengths, numbers, marks and cue words. `ascii_codes`: code points, 128 for all beyond ASCII."""
    is_word = tokens.classes == 1
    hashes, words = np.sort(tokens.hashes[is_word]), tokens.lengths[is_word]
    numbers = tokens.lengths[~is_word]
    ascii_counts = np.bincount(ascii_codes, minlength=129)
    cues = hashes.searchsorted(_CUE_HASHES, "right") - hashes.searchsorted(_CUE_HASHES, "left")
    longest_line = max(map(len, text.split("\n")))
    n_chars, n_words = max(len(ascii_codes), 1), max(len(words), 1)
    sizes = (
        log1p(len(ascii_codes)),
        log1p(len(hashes)),
        words.sum() / n_words,
        words.max(initial=0),
        np.count_nonzero(words > _LONG_WORD) / n_words,
        (np.count_nonzero(hashes[1:] != hashes[:-1]) + min(len(hashes), 1)) / n_words,
        log1p(len(numbers)),
        numbers.sum() / n_chars,
        numbers.max(initial=0),
        ascii_counts[128] / n_chars,
        log1p(longest_line),
        longest_line / n_chars,
        *(float(text.endswith(mark)) for mark in (".", "?", ":")),
    )
    logged = np.log1p(np.concatenate((ascii_counts[_MARK_CODES], cues)))
    return np.concatenate((sizes, logged)).astype(np.float32)


def _options(text: str) -> Array:
    """What a multiple choice looks like, if the question is one: its stem and its options."""
    lines = text.split("\n")
    found = {at: option[1] for at, line in enumerate(lines) if (option := _OPTION.fullmatch(line))}
    if len(found) < 2:
        return np.zeros(len(_OPTION_NAMES), np.float32)
    options = list(found.values())[:_MOST_OPTIONS]
    stem = "\n".join(lines[: next(iter(found))]).rstrip()
    lengths = np.array([len(option) for option in options], np.float64)
    bags = [set(option.split()) for option in options]
    every = set[str]().union(*bags)
    values = (
        len(options),
        np.log1p(lengths.mean()),
        np.log1p(lengths.max()),
        np.log1p(lengths.min()),
        lengths.std() / (lengths.mean() + 1.0),
        sum(_QUANTITY.fullmatch(option) is not None for option in options) / len(options),
        len(every) / max(sum(map(len, bags)), 1),
        len(every & set(stem.split())) / max(len(every), 1),
        np.log1p(len(stem)),
        *(float(stem.endswith(mark)) for mark in (".", "?", ":")),
        float("__" in stem),
        float(any("of the above" in option for option in options)),
    )
    return np.array(values, np.float32)


_SIZE_NAMES = (
    *("chars", "words", "mean_word", "longest_word", "long_words", "distinct_words", "numbers", "digit_share"),
    *("longest_number", "non_ascii", "longest_line", "longest_line_share"),
    *("ends_2e", "ends_3f", "ends_3a"),
)
_OPTION_NAMES = (
    *(
        "options",
        "mean_option",
        "longest_option",
        "shortest_option",
        "option_spread",
        "quantities",
        "distinct_option_words",
    ),
    *("options_in_stem", "stem", "stem_ends_2e", "stem_ends_3f", "stem_ends_3a", "stem_blank", "of_the_above"),
)
MEASURE_NAMES = (
    *_SIZE_NAMES,
    *(f"mark_{ord(mark):02x}" for mark in _MARKS),
    *(f"cue_{cue}" for cue in sorted(_CUES, key=_hash_of)),
    *_OPTION_NAMES,
)
