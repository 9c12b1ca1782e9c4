"""Grading two answers against each other."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.classifier.grading.agreement import ComparableAnswer, agree, grades

LONG = "The mitochondrion turns sugar into energy that the cell can use, by way of many small steps."
OTHER = "Photosynthesis happens in the chloroplasts of plants, which catch light with a green dye."


@pytest.mark.parametrize("marks", ["\u0345\u0301", "\uff9e\u0334"])
def test_a_tower_of_marks_is_compared_in_linear_time(marks: str) -> None:
    began = time.process_time()
    assert not agree(marks * 100_000, "5")
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Paris", "It is **Paris**.", True),
        ("Paris", "It is Rome.", False),
        ("3 + 4 = 7, so 7.", "The total is 7", True),
        ("It makes 1,200 in all.", "1200", True),
        ("It makes 12.", "It makes 13.", False),
        ("5 apples", "many apples", False),
        ('{"a": 1, "b": [2]}', '{"b": [2], "a": 1}', True),
        ('{"a": 1}', '{"a": 2}', False),
        (LONG, LONG.replace("many small steps", "several small steps"), True),
        (LONG, OTHER, False),
        ("", "Paris", False),
        ("Cafe\u0301", "It is Caf\u00e9.", True),
        ("कि", "की", False),
        ("😀", "😢", False),
        ("!!!", "???", False),
        ("It is B or A.", "C", False),
        ("x", "The answer is -x.", False),
        ("i", "-i", False),
        ("x", "y = x", True),
    ],
)  # fmt: skip
def test_saying_the_same(one: str, other: str, same: bool) -> None:
    assert agree(one, other) is same


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("The answer is -5.", "It is 5.", False),
        ("\u22125", "-5", True),
        ("-$5", "It costs -5 dollars", True),
        ("covid-19", "It is covid-19.", True),
        ("5-10", "10", False),
        ("1/2", "1.2", False),
        ("1/2", "0.5", True),
        ("It is 50 %.", "1/2", True),
        ("50%", "50", True),
        ("50", "0.5", False),
        ("1½ cups", "1 1/2", True),
        (r"So it is \(\frac{3}{4}\).", "0.75", True),
        ("1e5", "100,000", True),
        ("1/0", "1/0", True),
        ("1/0", "0", False),
        ("9" * 400, "9" * 401, False),
        ("1.2.3", "1.3", False),
        ("12:30", "11:30", False),
        ("2023-05-01", "It was 2022-06-01", False),
        ("1, 2, 3", "2, 1, 3", False),
        ("They are 1, 2 and 3.", "1,2,3", True),
        ("x = 3, y = 4", "x = 2, y = 4", False),
        ("3 + 4 = 7, 7 * 2 = 14", "14", True),
        ("It is 5, a prime.", "5", True),
        ("It is **5** for us.", "5", True),
        ("x > 5", "x < 5", False),
        ("x >= 5", "x ≥ 5", True),
        ("return x + 1", "return x - 1", False),
        ("2*3", "2+3", False),
        ("10^-3", "10^3", False),
        ("sqrt(2)", "2", False),
        ("a < b", "a > b", False),
        ("It is a/b", "a*b", False),
        ("C++", "C", False),
        ("C#", "It is C#.", True),
        ("a well-known and/or old thing", "a well known and or old thing", True),
        ("- Paris", "Paris", True),
        ("<b>Paris</b>", "Paris", True),
        ("vector<int>", "vector<str>", False),
    ],
)  # fmt: skip
def test_signs_and_operators_count(one: str, other: str, same: bool) -> None:
    assert agree(one, other) is agree(other, one) is same


SENTENCE = "The old bridge over the river was built by Roman soldiers in the first century before our era"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Paris", "It is not Paris", False),
        ("Paris", "It isn’t Paris", False),
        ("Paris", "Rome? No, it is Paris.", True),
        ("5", "It is not 5.", False),
        ("So 21 melons were not ready.", "21", True),
        ("42", "We need no tables. So it is 42.", True),
        ("guilty", "He is not guilty.", False),
        ("not guilty", "He is not guilty.", True),
        ("Das ist richtig", "Das ist nicht richtig", False),
        ("!a", "a", False),
        ("no", "No, never.", True),
        ("no", "The answer is no.", True),
        ("no", "There is no doubt: yes", False),
        ("yes", "There is no yes or no answer", False),
        (SENTENCE, SENTENCE.replace("was", "was not"), False),
        (SENTENCE, SENTENCE.replace("was", "has been"), True),
        (f"{SENTENCE}. {SENTENCE}.", f"{SENTENCE}. Not {SENTENCE}.", True),  # too long to tell by
    ],
)
def test_negation_on_one_side_is_a_disagreement(one: str, other: str, same: bool) -> None:
    assert agree(one, other) is agree(other, one) is same


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("北京是中国的首都。", "中国的首都是北京", True),
        ("北京,是中国的首都!", "北京是中国的首都。", True),
        ("北京", "中国的首都是北京。", True),
        ("北京", "不是北京。", False),
        ("北京是中国的首都。", "南京是中国的首都。", False),
        ("东京", "京东", False),
        ("東京です", "答えは東京です", True),
        ("答えは42です", "42", True),
        ("กรุงเทพ", "คือ กรุงเทพ", True),
    ],
)
def test_scripts_without_blanks_are_read_by_characters(one: str, other: str, same: bool) -> None:
    assert agree(one, other) is agree(other, one) is same


ANY = st.text(max_size=80) | st.text('ab 1250-+*/^<>=().,:%!?\n#|[]{}"不北京½', max_size=40)


@given(ANY, ANY)
def test_agreement_is_symmetric_for_any_text(one: str, other: str) -> None:
    assert agree(one, other) == agree(other, one)
    assert agree(one, one)


@given(st.integers(-10_000, 10_000), st.integers(-10_000, 10_000))
def test_numbers_agree_if_they_are_the_same(one: int, other: int) -> None:
    assert agree(f"{one:,}", f"The answer is {other}.") is (one == other)


@given(st.fractions(max_denominator=1000), st.fractions(max_denominator=1000))
def test_fractions_agree_if_they_are_the_same(one: Fraction, other: Fraction) -> None:
    assert agree(str(one), f"It is {other}.") is (one == other)


@pytest.mark.parametrize(
    "piece", ["(", "1", "-", "a ", "**", "1,", "1:", "a-", "\\frac{", "<b", " ", "####", "a(", "'", "1 and "]
)
def test_a_hostile_answer_takes_no_longer_than_another(piece: str) -> None:
    """Once a quarter as long and once whole: quadratic time would be sixteen-fold."""
    text = piece * (40_000 // len(piece))

    def seconds(part: str) -> float:
        begin = time.process_time()
        agree(part, f"{part}.")
        return time.process_time() - begin

    # The best of three: the garbage of other tests may be collected in between.
    short, whole = (min(seconds(part) for _ in range(3)) for part in (text[:10_000], text))
    assert whole < 10 * short + 0.1


def test_json_knows_truth_from_one_and_long_numbers_apart() -> None:
    assert not agree('{"a": true}', '{"a": 1}')
    assert not agree("[12345678901234567890.5]", "[12345678901234567891.5]")
    assert agree('{"a": [1.0, null]}', '{"a": [1, null]}')
    assert agree("[1e9999999999999999999]", "[1e9999999999999999999]")


def test_missing_answer_counts_against_its_tier() -> None:
    assert grades(ComparableAnswer("Paris"), ComparableAnswer("Paris")) == (1, 1)
    assert grades(ComparableAnswer("Rome"), ComparableAnswer("Paris")) == (0, 1)
    assert grades(ComparableAnswer("Paris"), ComparableAnswer("")) == (1, 0)
    assert grades(ComparableAnswer("Paris"), ComparableAnswer("I cannot help with that.")) == (1, 0)
    assert grades(ComparableAnswer("It is Paris and", "length"), ComparableAnswer("Paris")) == (0, 1)
    assert grades(ComparableAnswer(""), ComparableAnswer("")) == (0, 0)


CALLED = ComparableAnswer("", "tool_calls", (("add", '{"a": 1, "b": [2]}'), ("now", "")))


@pytest.mark.parametrize(
    ("local", "cloud", "graded"),
    [
        (CALLED, CALLED, (1, 1)),
        (ComparableAnswer("So I call:", "tool_calls", (("now", "{}"), ("add", '{"b":[2],"a":1}'))), CALLED, (1, 1)),
        (ComparableAnswer("", "tool_calls", (("add", '{"a": 1, "b": [3]}'), ("now", ""))), CALLED, (0, 1)),
        (ComparableAnswer("", "tool_calls", CALLED.calls[:1]), CALLED, (0, 1)),
        (ComparableAnswer("", "tool_calls", (*CALLED.calls, CALLED.calls[0])), CALLED, (0, 1)),
        (ComparableAnswer("It is 3."), CALLED, (0, 1)),
        (ComparableAnswer("add(1, [2])"), ComparableAnswer("add(1, [2])", "tool_calls", CALLED.calls), (0, 1)),
        (CALLED, ComparableAnswer("It is 3."), (0, 1)),
        (
            ComparableAnswer("", "tool_calls", (("now", "half {"),)),
            ComparableAnswer("", "tool_calls", (("now", "half {"),)),
            (1, 1),
        ),
        (ComparableAnswer("", "length", CALLED.calls), CALLED, (0, 1)),
        (CALLED, ComparableAnswer("", "length", CALLED.calls), (1, 0)),
    ],
)
def test_answers_that_call_tools(local: ComparableAnswer, cloud: ComparableAnswer, graded: tuple[float, float]) -> None:
    assert grades(local, cloud) == graded
