"""Numeric features of a question's wording, for policies trained on graded text: cheap measures and hashed n-grams.

Training and inference share the function `wording`. Its input is a normalised prompt, so that case and blanks cannot
change a decision. A typo changes only a few of hundreds of n-grams.
"""

from __future__ import annotations

import re
from math import log1p

import numpy as np

from ..arrays import Array
from .ngram_counts import COUNTS, TextCounts, count_text, hash_of

__all__ = ["COUNTS", "MEASURE_NAMES", "wording"]

_OPTION = re.compile(r"\(?(?:[a-j]|\d\d?)[.):] (.*)")
_QUANTITY = re.compile(r"[-+$£€]?[\d.,/^%]+(?: ?\S{1,3})?")
_MAX_OPTIONS = 12
_END_MARKS = (".", "?", ":")
_MARKS = "+-*/=<>%()[]{}:;,.?!\n`_#$^\\|'\""
_MARK_CODES = np.array([ord(mark) for mark in _MARKS])
_MARK_CODES.setflags(write=False)
_CUE_WORDS = (
    *("what", "which", "who", "when", "where", "why", "how", "many", "much", "if", "then", "than"),
    *("not", "except", "never", "true", "false", "following", "statement", "best", "most", "least", "likely"),
    *("according", "find", "calculate", "evaluate", "determine", "you", "i", "he", "she", "his", "her", "they"),
    *("total", "each", "per", "every", "more", "less", "fewer", "half", "twice", "times", "percent", "left", "rest"),
    *("the", "of", "a", "is", "write", "code", "explain"),
)
_CUES = sorted(_CUE_WORDS, key=hash_of)
_CUE_HASHES = np.array([hash_of(cue) for cue in _CUES], np.uint32)
_CUE_HASHES.setflags(write=False)


def wording(text: str) -> tuple[Array, Array]:
    """Return the measures, (len(MEASURE_NAMES),), and n-gram counts, (COUNTS,), of a normalised text; float32."""
    counts = count_text(text, _CUE_HASHES)
    return np.concatenate((_sizes(text, counts), _options(text))), counts.ngrams


def _sizes(text: str, counts: TextCounts) -> Array:
    logged = np.log1p(np.concatenate((counts.characters[_MARK_CODES], counts.cues)))
    return np.concatenate(([*_lengths(text, counts).values()], logged)).astype(np.float32)


def _lengths(text: str, counts: TextCounts) -> dict[str, float]:
    longest_line = max(map(len, text.split("\n")))
    n_chars, n_words = max(len(text), 1), max(counts.words, 1)
    return {
        "chars": log1p(len(text)),
        "words": log1p(counts.words),
        "mean_word": counts.word_letters / n_words,
        "longest_word": counts.longest_word,
        "long_words": counts.long_words / n_words,
        "distinct_words": counts.distinct_words / n_words,
        "numbers": log1p(counts.numbers),
        "digit_share": counts.digits / n_chars,
        "longest_number": counts.longest_number,
        "non_ascii": int(counts.characters[-1]) / n_chars,
        "longest_line": log1p(longest_line),
        "longest_line_share": longest_line / n_chars,
        **{f"ends_{ord(mark):02x}": float(text.endswith(mark)) for mark in _END_MARKS},
    }


def _options(text: str) -> Array:
    """Return measures of the stem and the options of a multiple-choice question; zeros for other questions."""
    lines = text.split("\n")
    options = {at: option[1] for at, line in enumerate(lines) if (option := _OPTION.fullmatch(line))}
    if len(options) < 2:
        return np.zeros(len(_OPTION_NAMES), np.float32)
    stem = "\n".join(lines[: next(iter(options))]).rstrip()
    return np.array([*_choice(stem, list(options.values())[:_MAX_OPTIONS]).values()], np.float32)


def _choice(stem: str, options: list[str]) -> dict[str, float]:
    lengths = np.array([len(option) for option in options], np.float64)
    bags = [set(option.split()) for option in options]
    every = set[str]().union(*bags)
    return {
        "options": len(options),
        "mean_option": np.log1p(lengths.mean()),
        "longest_option": np.log1p(lengths.max()),
        "shortest_option": np.log1p(lengths.min()),
        "option_spread": lengths.std() / (lengths.mean() + 1.0),
        "quantities": sum(_QUANTITY.fullmatch(option) is not None for option in options) / len(options),
        "distinct_option_words": len(every) / max(sum(map(len, bags)), 1),
        "options_in_stem": len(every & set(stem.split())) / max(len(every), 1),
        "stem": np.log1p(len(stem)),
        **{f"stem_ends_{ord(mark):02x}": float(stem.endswith(mark)) for mark in _END_MARKS},
        "stem_blank": float("__" in stem),
        "of_the_above": float(any("of the above" in option for option in options)),
    }


_OPTION_NAMES = (*_choice("", [""]),)
MEASURE_NAMES = (
    *_lengths("", count_text("", _CUE_HASHES)),
    *(f"mark_{ord(mark):02x}" for mark in _MARKS),
    *(f"cue_{cue}" for cue in _CUES),
    *_OPTION_NAMES,
)
