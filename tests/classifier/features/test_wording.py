"""The wording's features: what must not change them, what must, and that the question is found in boilerplate."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.classifier.arrays import Array
from updraft.classifier.features.question import normalized_prompt, question_of
from updraft.classifier.features.wording import COUNTS, MEASURE_NAMES, wording

# Half a millisecond, where 10,000 additions in Python take a third of one.
_MOST = 1.5
QUESTION = "Which of the following is NOT a prime?\nA. 2\nB. 9\nC. 11\nD. 13\nAnswer:"


def worded(question: str) -> tuple[Array, Array]:
    return wording(normalized_prompt(question))


@given(st.text(max_size=400))
def test_any_text_has_features(text: str) -> None:
    measures, counts = worded(text)
    assert measures.shape == (len(MEASURE_NAMES),)
    assert counts.shape == (COUNTS,)
    assert np.isfinite(measures).all()
    assert np.isfinite(counts).all()


@pytest.mark.parametrize("noise", [str.upper, str.swapcase, lambda t: t.replace(" ", " \t "), lambda t: f"\n {t} \n\n"])
def test_case_and_blanks_change_nothing(noise) -> None:
    for one, other in zip(worded(QUESTION), worded(noise(QUESTION)), strict=True):
        assert (one == other).all()


def test_a_typo_changes_little() -> None:
    before, after = (worded(text)[1] for text in (QUESTION, QUESTION.replace("following", "follwoing")))
    assert 0 < np.abs(before - after).sum() < 0.35 * before.sum()


def test_numbers_are_not_remembered() -> None:
    assert (worded("What is 17 + 25?")[1] == worded("What is 38 + 64?")[1]).all()


def test_measure_values() -> None:
    features = dict(zip(MEASURE_NAMES, worded(QUESTION)[0].tolist(), strict=True))
    assert features["options"] == 4
    assert features["quantities"] == 1
    assert features["stem_ends_3f"] == 1
    assert features["cue_not"] > 0
    assert features["cue_total"] == 0
    assert dict(zip(MEASURE_NAMES, worded("A. one thing")[0].tolist(), strict=True))["options"] == 0


def test_folding_is_final() -> None:
    assert normalized_prompt(" A  b\r\n\n c ") == "a b\nc"


def test_two_thousand_characters_are_quick() -> None:
    text = (QUESTION * 40)[:2000]
    worded(text)
    taken: list[float] = []
    yardstick: list[float] = []
    for _ in range(200):
        started = time.thread_time()
        worded(text)
        between = time.thread_time()
        sum(at for at in range(10_000))
        taken.append(between - started)
        yardstick.append(time.thread_time() - between)
    # The quickest, and beside 10,000 additions: whatever else runs on the machine must not fail a test.
    assert min(taken) < _MOST * min(yardstick)


ASKED = "Why is the sky blue?"


@pytest.mark.parametrize(
    "text",
    [
        ASKED,
        f"<|im_start|>system\nAct.<|im_end|>\n<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n",
        f"System: be brief\nUser: hello\nAssistant: hi\nUser: {ASKED}",
        f"Human: {ASKED}\n\nAssistant:",
        f"### User:\n{ASKED}\n### Assistant:\n",
        f"<environment_details>\nfiles: a.py\n</environment_details>\n<user_query>{ASKED}</user_query>",
        f"<system-reminder>use tools</system-reminder>\n{ASKED}\n<context>long text</context>",
        f"<|start_header_id|>system<|end_header_id|>\n\nx<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{ASKED}<|eot_id|>",
    ],
)
def test_the_question_is_found(text: str) -> None:
    assert question_of(text) == ASKED


@pytest.mark.parametrize(
    "text",
    ["", "User: root was not found, why?", "<context>only this</context>", "<user_query> </user_query>", "a < b </c>"],
)
def test_nothing_is_lost_where_nothing_is_found(text: str) -> None:
    assert question_of(text) == text


@pytest.mark.parametrize(
    "part",
    [
        "<task>",
        "<context>",
        "<context a",
        "<examples ",
        "<context></context>",
        "</",
        "</context>",
        "user:\n",
        "<|im_start|> ",
    ],
)
def test_a_hostile_prompt_takes_no_longer_than_its_length(part: str) -> None:
    """A megabyte of tags that nothing closes took minutes, and the whole process with it."""
    text = part * (1_000_000 // len(part)) + "</"
    started = time.process_time()
    question_of(text)
    assert time.process_time() - started < 5
