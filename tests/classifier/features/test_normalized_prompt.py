"""Spellings of a prompt that no gate notices, and differences that must not get lost."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.classifier.features.blocks import BLOCKS, ParsedRun, view_of
from updraft.classifier.features.question import normalized_prompt
from updraft.classifier.graded_row import GradedRow

PROMPT = """Café Zoë sells 12 rolls - 3 with "seeds" - and Ann's bakery 4.

How many are that?
A. 16
B. 19 (all)
```
x = 1
```"""


def full_width(text: str) -> str:
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text).replace(" ", "\u3000")


TYPED: dict[str, Callable[[str], str]] = {
    "upper case": str.upper,
    "title case": str.title,
    "double blanks": lambda text: text.replace(" ", "  "),
    "tabs": lambda text: text.replace(" ", "\t"),
    "line feed behind": lambda text: text + "\n",
    "blanks around": lambda text: f" \n\n  {text} \r\n",
    "no-break spaces": lambda text: text.replace(" ", "\u00a0"),
    "thin spaces": lambda text: text.replace(" ", "\u2009\u202f"),
    "Windows line ends": lambda text: text.replace("\n", "\r\n"),
    "line separators": lambda text: text.replace("\n", "\u2028"),
    "full width": full_width,
    "decomposed": lambda text: unicodedata.normalize("NFD", text),
    "zero-width blanks": lambda text: text.replace("e", "e\u200b").replace("o", "\u2060o"),
    "byte order mark": lambda text: "\ufeff" + text,
    "soft hyphens": lambda text: text.replace("ll", "l\u00adl"),
    "curly quotes": lambda text: text.replace(' "', " \u201c").replace('" ', "\u201d ").replace("'", "\u2019"),
    "dashes": lambda text: text.replace(" - ", " \u2013 "),
    "bold letters": lambda text: text.replace("seeds", "\U0001d42c\U0001d41e\U0001d41e\U0001d41d\U0001d42c"),
    "right-to-left mark": lambda text: text + "\u200f",
}


@pytest.mark.parametrize("typed", TYPED)
def test_no_gate_notices_how_a_prompt_is_typed(typed: str) -> None:
    other = TYPED[typed](PROMPT)
    assert other != PROMPT
    answer = "12 + 4 = 16. Ann's has 4."
    one, two = (ParsedRun.of(view_of(GradedRow(text, 0.0, 0.0, answer=answer))) for text in (PROMPT, other))
    assert np.array_equal(one.question.counts, two.question.counts)
    for name, block in BLOCKS.items():
        assert np.array_equal(block.compute(one), block.compute(two)), name


@pytest.mark.parametrize(
    ("one", "other"),
    [("x² + 1", "x2 + 1"), ("½ cup", "1/2 cup"), ("H₂O", "H2O"), ("a b", "ab"), ("one\ntwo", "one two"), ("①", "1")],
)
def test_meaningful_characters_are_kept(one: str, other: str) -> None:
    assert normalized_prompt(one) != normalized_prompt(other)


@given(st.text(max_size=200))
def test_the_form_is_final(text: str) -> None:
    once = normalized_prompt(text)
    assert normalized_prompt(once) == once


def test_scripts_without_case_or_blanks_pass_through() -> None:
    for text in ("光合作用是什么？", "สวัสดีครับ", "東京の人口は？"):
        assert normalized_prompt(text) in (text, text.replace("？", "?"))
