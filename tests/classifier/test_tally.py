"""What C counts in a text is what numpy counts, to the last bit; and where there is no compiler numpy does."""

import dataclasses
import logging

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from updraft.classifier import tally
from updraft.classifier.tally import COUNTS, Tally, Tallying, hash_of
from updraft.kernels.native_library import NativeBuildError

CUES = sorted(("the", "what", "if", "a"), key=hash_of)
WORDS = st.sampled_from(
    ["the", "what", "if", "a", "thé", "12", "007", "unquestionably", "\n", " ", ".", "٣", "字", "\ud800"]
)


@pytest.fixture(scope="module")
def native() -> Tallying:
    if tally._native() is None:
        pytest.skip("there is no C compiler")
    return Tallying(CUES)


def equal(one: Tally, other: Tally) -> bool:
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(Tally)]
    return all(np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype for a, b in pairs)


@settings(max_examples=300)
@given(st.one_of(st.text(max_size=80), st.lists(WORDS, max_size=200).map("".join)))
@example("")
@example("a")
@example("ab")
@example("the " * 3000)  # more often than anything counts
@example("x" * 300 + "1" * 300)  # longer than there are powers
@example(" ".join(str(number) for number in range(3000)))
@example(" ".join("abcdefghij"[digit] * (1 + at % 7) for at in range(2000) for digit in (at % 10, at // 10 % 10)))
def test_c_counts_as_numpy_does(native: Tallying, text: str) -> None:
    assert equal(native.of(text), Tallying(CUES, native=False).of(text))


@pytest.mark.parametrize("in_c", [True, False])
def test_what_is_counted(in_c: bool) -> None:
    found = Tallying(CUES, native=in_c).of("what if the 12 if, 7?")
    assert (found.words, found.word_letters, found.longest_word, found.distinct_words) == (4, 11, 4, 3)
    assert (found.numbers, found.digits, found.longest_number) == (2, 3, 2)
    assert dict(zip(CUES, found.cues.tolist(), strict=True)) == {"what": 1, "if": 2, "the": 1, "a": 0}
    assert found.characters[ord("i")] == 2
    # Six tokens of which "if" is there twice, and its five pairs; 21 characters and a blank at either end.
    half = COUNTS // 2
    grams = [np.expm1(part[part > 0] - 1.0) + 1.0 for part in (found.counts[:half], found.counts[half:])]
    assert [round(float(part.sum())) for part in grams] == [11, 20]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def none(_sources: object) -> None:
        raise NativeBuildError("there is no C compiler")

    tally._native.cache_clear()
    monkeypatch.setattr(tally, "load_from", none)
    try:
        with caplog.at_level(logging.INFO, "updraft.classifier"):
            assert Tallying(CUES).of("what?").words == 1
    finally:
        tally._native.cache_clear()
    assert "counted in numpy" in caplog.text
