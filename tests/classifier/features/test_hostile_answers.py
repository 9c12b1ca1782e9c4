"""Answers that repeat themselves without end: reading one takes time in proportion to its length."""

from __future__ import annotations

import string
import time

import pytest
from updraft.classifier.features.blocks import BLOCKS, GATE_BLOCKS, AnswerFindings, ParsedRun, view_of
from updraft.classifier.features.gate_inputs import PromptView
from updraft.classifier.features.parsed_question import ParsedQuestion
from updraft.classifier.graded_row import GradedRow

_QUESTION = "Tom has 12 apples and eats 3. How many are left?"
# Letters and digits are as good as each other to all that is read; x is also a sign for "times".
_CHARACTERS = f"{string.punctuation}{string.whitespace}1ax"
# What several characters make: sums that nothing follows, products, units, asides.
_PHRASES = ("1 +  ", "1+\n", "-1  ", "1 x ", "1 a b ", "1 (a) ", "a, ", "1 < ", "<<1=", "1 = 1 ", "\\times ")


def _seconds(run: str, length: int) -> float:
    """CPU time to read an answer of a number, `length` characters of `run` and a full stop."""
    answer = f"7{run * (length // len(run))}."
    asked = ParsedQuestion.of(PromptView(_QUESTION))
    started = time.thread_time()
    read = ParsedRun(view_of(GradedRow(_QUESTION, 0.0, 0.0, "", answer)), asked, AnswerFindings.of(answer))
    for name in GATE_BLOCKS["cascade"]:
        BLOCKS[name].compute(read)
    return time.thread_time() - started


def _is_slow(run: str, length: int, most_s: float) -> bool:
    """Every time: once the collector of garbage may have come in between, which in a whole run of tests takes long."""
    return all(_seconds(run, length) > most_s for _ in range(3))


@pytest.mark.parametrize("run", [*_CHARACTERS, *_PHRASES])
def test_a_long_run_takes_time_in_proportion(run: str) -> None:
    assert not _is_slow(run, 30_000, 1.0)


@pytest.mark.parametrize("first", _CHARACTERS)
def test_so_does_a_run_of_any_pair(first: str) -> None:
    others = _CHARACTERS[_CHARACTERS.index(first) + 1 :]
    assert [pair for pair in (first + second for second in others) if _is_slow(pair, 5_000, 0.3)] == []
