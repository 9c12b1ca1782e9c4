"""An answer read line by line gives the same as the whole of it, wherever its lines end."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from updraft.classifier.features import blocks
from updraft.classifier.features.answers.parts import parts_of
from updraft.classifier.features.blocks import AnswerFindings
from updraft.classifier.policy.answer_reader import AnswerReader

#: Whatever may go on over a line's end: sums, comparisons, lists, marks, brackets, units, thousands, words and numbers.
PIECES = (
    *("\n", "\n\n", "\n", " \n ", " ", "  ", ".", ". ", ",", ", ", "!", "?", ":", ";", "\t", "\r\n"),
    *("3 + 4 = 7", "12", "1,000", "5.", ".5", "0.25", " = 12", "=", " - 2", "+", "*", "×", "÷ 4", "/", "-", "−", "%"),
    *("a, b, c", "1, 2, 3", "3 < 4 > 2", "<", ">", "<<3*4=12>>", "<<", ">>", "<<3*4", "=12>>", "(", ")", "(so", "x 3"),
    *("miles", "7 miles + 2", "X", "$5", "#### 20", "Answer: ", "therefore", "s p e l t", "Σ", "ΑΣ", "é", "x"),
    "\\times 2",
)
#: Lines that are long enough to be read ahead, with what may go on over their ends.
LINES = st.tuples(st.sampled_from(PIECES), st.just(" which they all had to do by then "), st.sampled_from(PIECES))
TEXTS = st.lists(st.sampled_from(PIECES) | LINES.map("".join), max_size=30).map("".join)
STEPS = "She buys 3 x $4 = $12 worth of bread.\nShe pays 20 - 12 = <<20-12=8>>8 dollars back\n\nSo it is 8.\n#### 8"


@given(TEXTS, st.integers(1, 12))
@example(STEPS, 3)
@example("They sold their apples, pears,\nplums, figs and more", 1)
@example("They sold pears and all of the apples\n, plums, figs and more", 1)
@example("There were altogether some 12\n+ 3 = 15 of them", 1)
def test_lines_together_say_what_the_whole_says(text: str, token: int) -> None:
    reader = AnswerReader()
    for end in range(token, len(text), token):
        reader.read_ahead(text[:end])
        if end % 5 == 0:
            assert reader.read(text[:end]) == AnswerFindings.of(text[:end])
    assert reader.read(text) == AnswerFindings.of(text)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were searched."""
    searches: list[str] = []
    monkeypatch.setattr(blocks, "parts_of", lambda text: [searches.append(text), parts_of(text)][1])
    return searches


def test_at_the_end_only_the_last_line_is_left(searched: list[str]) -> None:
    reader = AnswerReader()
    for end in range(1, len(STEPS)):
        reader.read_ahead(STEPS[:end])
    assert "".join(searched) == STEPS[: STEPS.index("\n\nSo")]
    reader.read(STEPS)
    assert searched[-1] == "\n\nSo it is 8.\n#### 8"
    assert len(searched) == 3


def test_answers_are_cached_separately_and_the_oldest_evicted(searched: list[str]) -> None:
    reader = AnswerReader(2)
    answers = [f"The {number} of them that were there were seen by all of us.\nAnd so on." for number in range(3)]
    for answer in answers:
        reader.read_ahead(answer)
    searched.clear()
    for answer in answers:
        reader.read(answer)
    assert [len(text) for text in searched] == [len(answers[0]), len("\nAnd so on."), len("\nAnd so on.")]


def test_open_bracket_or_mark_spans_lines(searched: list[str]) -> None:
    for opened, closed in (("(that is\nall", ") 5 + 3 = 8"), ("<<5+3\n", "=8>>")):
        searched.clear()
        reader = AnswerReader()
        text = f"We have seen forty-one apples and some pears {opened}"
        reader.read_ahead(text + "\nand")
        assert searched == []
        assert reader.read(text + closed) == AnswerFindings.of(text + closed)
