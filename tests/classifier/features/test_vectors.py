"""The featurisers: stable to the bit within a version, finite for any input, and about what they claim to measure."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from updraft.classifier.arrays import Array
from updraft.classifier.features import vectors as features
from updraft.classifier.features.answer_checks import ANSWER_NAMES, answer_checks
from updraft.classifier.features.gate_inputs import PromptView, RunView
from updraft.classifier.features.parsed_question import ParsedQuestion
from updraft.classifier.features.question_vector import STRUCTURE_NAMES
from updraft.classifier.features.question_vector import ngrams as ngrams_of
from updraft.classifier.features.question_vector import structure as structure_of
from updraft.classifier.features.token_signals import PROMPT_SIGNAL_NAMES, SIGNAL_NAMES, prompt_signals, signals
from updraft.classifier.features.vectors import FEATURE_VERSION, GATES, FeatureLayout
from updraft.protocol.requests import Message

HIDDEN = 3


def run_view(answer: str = "12 + 7 = 19. Answer: 19", prompt: str = "What is 12 + 7?") -> RunView:
    return RunView(
        prompt=PromptView(prompt),
        answer=answer,
        logprobs=np.array([-0.1, -0.5, -2.25, -0.01, -0.3], np.float32),
        entropies=np.array([0.2, 0.75, 1.5, 0.05, 0.5], np.float32),
        margins=np.array([3.0, 1.0, 0.125, 5.0, 2.0], np.float32),
        prompt_logprobs=np.array([-3.0, -1.0, -7.5, -0.25], np.float32),
        prompt_hidden=np.array([0.5, -1.0, 2.0], np.float32),
        answer_hidden=np.array([1.0, 0.0, -0.5], np.float32),
        finish_reason="stop",
    )


def ngrams(question: str) -> Array:
    return ngrams_of(ParsedQuestion.of(question).counts)


def structure(question: str) -> dict[str, float]:
    asked = ParsedQuestion.of(question)
    return named(STRUCTURE_NAMES, structure_of(asked.text, asked.measures))


def named(names: tuple[str, ...], values: np.ndarray) -> dict[str, float]:
    return dict(zip(names, values.tolist(), strict=True))


def digest(vector: np.ndarray) -> int:
    """A checksum after rounding, so that the last bit of a logarithm may differ between machines."""
    return zlib.crc32(np.round(vector.astype(np.float64), 4).astype(np.float32).tobytes())


def test_features_are_those_of_their_version() -> None:
    """Whoever changes a feature must raise FEATURE_VERSION, and then these checksums."""
    view = run_view()
    found = {
        "gate1": digest(features.before(PromptView("Naïve “test”: sort 3, 14, 159; then?\n")) + 0.0),
        "gate2": digest(features.during(view, 3) + 0.0),
        "gate3": digest(features.after(view) + 0.0),
    }
    assert (FEATURE_VERSION, found) == (4, GOLDEN)


GOLDEN = {"gate1": 1660956885, "gate2": 3192817042, "gate3": 2806868555}


@pytest.mark.parametrize("gate", GATES)
def test_layout_names_every_column_once(gate: features.Gate) -> None:
    layout = FeatureLayout(gate, HIDDEN)
    view = run_view()
    vector = {
        "gate1": features.before(view.prompt),
        "gate2": features.during(view, 8),
        "gate3": features.after(view),
    }[gate]
    assert vector.shape == (layout.width,)
    assert vector.dtype == np.float32
    assert len(layout.names) == layout.width == len(set(layout.names))
    assert vector[layout.names.index("numbers")] == pytest.approx(np.log1p(2))
    assert vector[layout.names.index("largest_number")] == pytest.approx(np.log10(13))


SERIES = arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32, allow_nan=True, allow_infinity=True))


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.text(st.characters(), max_size=300),
    answer=st.text(st.characters(), max_size=300),
    tokens=st.integers(0, 30),
    data=st.data(),
    finished=st.booleans(),
)
def test_features_are_finite_for_any_input(
    prompt: str, answer: str, tokens: int, data: st.DataObject, finished: bool
) -> None:
    values = st.floats(width=32, allow_nan=True, allow_infinity=True)
    series = [data.draw(arrays(np.float32, tokens, elements=values)) for _ in range(3)]
    view = RunView(
        PromptView(prompt),
        answer,
        *series,
        prompt_logprobs=data.draw(SERIES),
        prompt_hidden=data.draw(arrays(np.float32, HIDDEN, elements=values)),
        answer_hidden=data.draw(arrays(np.float32, HIDDEN, elements=values)) if finished else None,
        finish_reason="length" if finished else "",
    )
    for vector in (features.before(view.prompt), features.during(view, 8), features.after(view)):
        assert np.isfinite(vector).all()


def test_lone_surrogates_and_empty_text_have_features() -> None:
    for text in ("", "\ud800", "\x00", "9" * 5000, "“" * 5000):
        assert np.isfinite(features.before(PromptView(text))).all()


def test_a_megabyte_prompt_is_read_whole_and_in_seconds() -> None:
    text = "“'{1,2} = " * 100_000
    found = structure(text)
    assert found["chars"] == pytest.approx(np.log1p(len(text.strip())))
    assert found[f"mark_{ord('='):02x}"] == pytest.approx(np.log1p(100_000))
    assert np.isfinite(answer_checks(run_view(answer="1 + 1 " * 50_000))).all()


def test_ngrams_see_wording_and_not_the_numbers() -> None:
    base = ngrams("What is 12 + 34?")
    assert np.array_equal(base, ngrams("what IS 56 + 78?"))
    assert not np.array_equal(base, ngrams("What is 12 - 34?"))
    half = len(base) // 2
    assert np.linalg.norm(base[:half]) == pytest.approx(1.0, abs=1e-6)
    assert np.linalg.norm(base[half:]) == pytest.approx(1.0, abs=1e-6)
    assert not ngrams("").any() or np.isfinite(ngrams("")).all()


@pytest.mark.parametrize("noise", [str.upper, str.title, lambda text: text.replace(" ", " \t "), "\n {}\n\n".format])
def test_casing_and_blanks_change_nothing(noise: Callable[[str], str]) -> None:
    asked = "Sort 3.5, 14 and 159: which “word” comes after 'aaab', please?"
    assert np.array_equal(features.before(PromptView(asked)), features.before(PromptView(noise(asked))))


def test_the_question_is_found_in_a_chat_log() -> None:
    asked = "What is 12 + 34?"
    chat = f"<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    assert np.array_equal(features.before(PromptView(asked)), features.before(PromptView(chat)))


def test_quantities_say_how_large_and_how_long() -> None:
    found = structure("Order 7, 1234 and 0.5; then spell 'balloon' and “tree”.")
    assert found["largest_number"] == pytest.approx(np.log10(1235))
    assert found["smallest_number"] == pytest.approx(np.log10(1.5))
    assert found["sum_of_magnitudes"] == pytest.approx(np.log10(1235) + np.log10(8) + np.log10(1.5))
    assert (found["decimals"], found["distinct_numbers"]) == (1, 1)
    assert found["longest_quote"] == pytest.approx(np.log1p(4))
    assert found["longest_repeat"] == pytest.approx(np.log1p(2))
    assert structure("no numbers")["largest_number"] == 0


def test_similar_questions_are_near_and_others_far() -> None:
    asked, similar, other = (
        ngrams("Multiply 12 by 7, please."),
        ngrams("Please multiply 81 by 3."),
        ngrams("Which day comes after Friday?"),
    )
    assert asked @ similar > 2 * abs(asked @ other)


def test_gate_two_reads_only_the_first_tokens() -> None:
    view = run_view()
    later = replace(
        view,
        answer="something else",
        logprobs=np.append(view.logprobs[:3], np.float32(-9)),
        entropies=np.append(view.entropies[:3], np.float32(9)),
        margins=np.append(view.margins[:3], np.float32(0)),
        answer_hidden=None,
    )
    assert np.array_equal(features.during(view, 3), features.during(later, 3))
    assert not np.array_equal(features.during(view, 4), features.during(later, 4))


def test_signal_statistics_match_numpy() -> None:
    rng = np.random.default_rng(0)
    logprobs = -rng.exponential(1.0, 23).astype(np.float32)
    view = replace(run_view(), logprobs=logprobs, entropies=-logprobs, margins=-logprobs)
    found = named(SIGNAL_NAMES, signals(view))
    windows = np.convolve(logprobs, np.ones(4) / 4, "valid")
    assert found["logprob_mean"] == pytest.approx(logprobs.mean(), rel=1e-5)
    assert found["logprob_q10"] == pytest.approx(np.quantile(logprobs, 0.1), rel=1e-5)
    assert found["logprob_worst_window"] == pytest.approx(windows.min(), rel=1e-5)
    assert found["logprob_slope"] == pytest.approx(np.polyfit(np.linspace(-0.5, 0.5, 23), logprobs, 1)[0], rel=1e-4)
    assert found["logprob_below_-1"] == pytest.approx(np.log1p((logprobs < -1).sum()))
    assert found["certainty_min"] == pytest.approx(logprobs.min(), rel=1e-5)


def test_impossible_signals_count_as_extreme() -> None:
    worst = np.array([-np.inf, np.nan], np.float32)
    view = replace(run_view(), logprobs=worst, entropies=-worst, margins=worst, prompt_logprobs=worst)
    found = named(SIGNAL_NAMES, signals(view)) | named(PROMPT_SIGNAL_NAMES, prompt_signals(worst))
    assert found["logprob_min"] == found["logprob_max"] == found["prompt_max"] == -30
    assert found["certainty_max"] == -15
    assert found["margin_max"] == 0


def test_signals_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry per token"):
        signals(replace(run_view(), margins=np.zeros(2, np.float32)))


@pytest.mark.parametrize(
    ("answer", "statements", "false"),
    [
        ("12 + 7 = 19. Answer: 19", 1, 0),
        ("12 + 7 = 18. Answer: 18", 1, 1),
        ("2 + 3 * 4 = 14; 20 - 5 - 1 = 14", 2, 0),
        ("2 + 3 * 4 = 20", 1, 1),
        ("9 / 2 = 4.5; 8 ÷ 0 = 0; 3 × 3 = 9", 3, 1),
        ("5 - 9 = -4", 1, 0),
        ("(2 + 3) * 4 + 1 = 21", 0, 0),
        ("no sums here = none", 0, 0),
    ],
)
def test_stated_sums_are_checked(answer: str, statements: int, false: int) -> None:
    found = named(ANSWER_NAMES, answer_checks(run_view(answer)))
    assert found["answer_statements"] == pytest.approx(np.log1p(statements))
    assert found["answer_false_statements"] == pytest.approx(np.log1p(false))


PRICES = "Prices: rice 12, milk 11, oil 7. What do 2 oil cost?"


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        (PRICES, "One oil costs 7; 2 oil cost 2 * 7 = 14.", {"bound": 3, "misbound": 0}),
        (PRICES, "One oil costs 11; 2 oil cost 2 * 11 = 22.", {"bound": 1, "misbound": 2}),
        (PRICES, "2 * 11 = 22", {"bound": 0, "misbound": 0}),
        ("Order 3, 9, 5.", "3, 5, 9", {"list_items": 3, "list_kinks": 0}),
        ("Order 3, 9, 5, 7.", "3, 9, 5, 7", {"list_items": 4, "list_kinks": 1}),
        ("Who is first?", "In order: Ada, Ben, Ada, Cleo.", {"list_items": 4, "list_repeats": 1, "list_kinks": 0}),
        ("Order them.", "In order: 9.11 < 9.9 < 9.95.", {"list_items": 3, "statements": 2, "false_statements": 0}),
        ("Order them.", "9.9 < 9.11", {"statements": 1, "false_statements": 1}),
        ("How many r in berry?", "1 b: 0; 2 e: 0; 3 r: 1; 4 r: 2; 5 y: 2. Answer: 2", {"spelled": 1, "misspelled": 0}),
        ("How many r in berry?", "1 b: 0; 2 e: 0; 3 r: 1; 4 y: 1. Answer: 1", {"spelled": 1, "misspelled": 1}),
        ("How many r in berry?", "I say two.", {"spelled": 0, "misspelled": 0}),
    ],
)
def test_answer_checks_compare_lists_bindings_and_letters(prompt: str, answer: str, expected: dict[str, int]) -> None:
    found = named(ANSWER_NAMES, answer_checks(run_view(answer, prompt)))
    counted = ("bound", "misbound", "list_items", "statements", "false_statements")
    for name, value in expected.items():
        assert found[f"answer_{name}"] == pytest.approx(np.log1p(value) if name in counted else value), name


@pytest.mark.parametrize("text", ["a" * 200_000, "a, " * 100_000, "1 < " * 50_000, " " * 200_000, "1.1" * 60_000])
def test_answer_checks_read_long_answers_in_seconds(text: str) -> None:
    started = time.process_time()
    answer_checks(run_view(text))
    assert time.process_time() - started < 10


def test_answer_checks_see_form() -> None:
    cut = named(ANSWER_NAMES, answer_checks(replace(run_view("again again again again"), finish_reason="length")))
    assert cut["answer_length_stop"] == 1
    assert cut["answer_repeats"] == pytest.approx(np.log1p(3))
    assert cut["answer_distinct_words"] == 0.25
    broken = named(ANSWER_NAMES, answer_checks(run_view('{"a": [1, 2')))
    assert (broken["answer_json"], broken["answer_broken_json"], broken["answer_unbalanced"]) == (0, 1, 2)
    final = named(ANSWER_NAMES, answer_checks(run_view("12 + 7 = 19. Answer: 23")))
    assert (final["answer_has_final"], final["answer_final_derived"]) == (1, 0)
    assert named(ANSWER_NAMES, answer_checks(run_view("  ")))["answer_empty"] == 1


def test_the_last_user_turn_is_the_question() -> None:
    messages = [
        Message("system", "You are an agent. " * 50),
        Message("user", "first"),
        Message("assistant", "ok"),
        Message("user", "second"),
        Message("assistant", "par"),
    ]
    view = PromptView.of(messages)
    assert view.text == "second"
    assert PromptView.of([]).text == ""
    assert PromptView.of(messages[:1]).text == messages[0].text
