"""The featurisers: stable to the bit within a version, finite for any input, and about what they claim to measure."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from updraft.classifier.arrays import Array
from updraft.classifier.features.answers.checks import ANSWER_NAMES, QuestionParts, answer_checks
from updraft.classifier.features.blocks import (
    BLOCKS,
    FEATURE_VERSION,
    GATE_BLOCKS,
    OPENING_TOKENS,
    BlockName,
    Mode,
    ParsedRun,
)
from updraft.classifier.features.feature_rows import featurise, has_opening
from updraft.classifier.features.gate_inputs import PromptView, RunView
from updraft.classifier.features.parsed_question import ParsedQuestion
from updraft.classifier.features.quantities import QUANTITY_NAMES
from updraft.classifier.features.token_signals import PROMPT_SIGNAL_NAMES, SIGNAL_NAMES, prompt_signals, signals
from updraft.classifier.features.wording import MEASURE_NAMES
from updraft.classifier.graded_row import AnswerSignals, GradedRow, ModelStates
from updraft.protocol.errors import InvalidRequestError
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


def checked(answer: str, prompt: str = "What is 12 + 7?") -> Array:
    return answer_checks(answer, QuestionParts.of(prompt))


def question(text: str) -> Array:
    """All that gate 1 reads but the counts."""
    return gate("prompt", replace(run_view(), prompt=PromptView(text)))


def gate(mode: Mode, view: RunView) -> Array:
    run = ParsedRun.of(view)
    return np.concatenate([BLOCKS[name].compute(run) for name in GATE_BLOCKS[mode]])


def structure(text: str) -> dict[str, float]:
    asked = ParsedQuestion.of(PromptView(text))
    return named((*MEASURE_NAMES, *QUANTITY_NAMES), np.concatenate((asked.measures, asked.quantities)))


def named(names: tuple[str, ...], values: np.ndarray) -> dict[str, float]:
    return dict(zip(names, values.tolist(), strict=True))


def digest(vector: np.ndarray) -> int:
    """A checksum after rounding, so that the last bit of a logarithm may differ between machines."""
    return zlib.crc32(np.round(vector.astype(np.float64), 4).astype(np.float32).tobytes())


def test_features_are_those_of_their_version() -> None:
    """A changed feature needs a higher FEATURE_VERSION, and then new checksums here."""
    run = ParsedRun.of(run_view(prompt="Naïve “test”: sort 3, 14, 159; then?\n"))
    digests = {name: digest(block.compute(run) + 0.0) for name, block in BLOCKS.items()}
    assert (FEATURE_VERSION, digests, digest(run.question.counts)) == (4, GOLDEN, 1242523135)


GOLDEN = {
    "wording": 952603002,
    "quantities": 438032633,
    "conversation": 2581328965,
    "checks": 2874915877,
    "steps": 2330234214,
    "ending": 558161692,
    "signals": 3030227139,
    "opening": 3030227139,
    "prompt_signals": 3512555278,
    "prompt_hidden": 1889928161,
    "answer_hidden": 931556976,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_as_wide_as_it_says(name: BlockName) -> None:
    features = BLOCKS[name].compute(ParsedRun.of(run_view()))
    assert features.shape == (BLOCKS[name].width or HIDDEN,)
    assert features.dtype == np.float32


def graded(*, answer: bool = True, signals: bool = True, states: bool = True) -> GradedRow:
    view = run_view()
    return GradedRow(
        view.prompt.text,
        0.0,
        1.0,
        answer=view.answer if answer else None,
        signals=AnswerSignals(view.logprobs, view.entropies, view.margins) if signals else None,
        states=ModelStates(view.prompt_logprobs, view.prompt_hidden, view.prompt_hidden, "stop") if states else None,
        messages=(Message(role="user", content=view.prompt.text),),
    )


@pytest.mark.parametrize("mode", GATE_BLOCKS)
def test_a_gate_reads_the_blocks_that_all_rows_have(mode: Mode) -> None:
    assert (*featurise([graded()] * 2, mode).blocks,) == GATE_BLOCKS[mode]
    bare = featurise([graded(states=False)] * 2, mode)
    inspected = ("ending", "prompt_signals", "prompt_hidden", "answer_hidden")
    assert (*bare.blocks,) == tuple(name for name in GATE_BLOCKS[mode] if name not in inspected)
    assert bare.measures.shape == (2, sum(bare.widths.values()))


def test_rows_that_lack_what_others_have_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="Only 1 of 2 rows have the data for the block signals"):
        featurise([graded(), graded(signals=False)], "cascade")
    with pytest.raises(InvalidRequestError, match="add the column weak_response"):
        featurise([graded(answer=False)], "cascade")
    with pytest.raises(InvalidRequestError, match="add the columns logprobs, entropies and margins"):
        featurise([graded(signals=False)], "opening")
    assert not has_opening(graded())


SERIES = arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32, allow_nan=True, allow_infinity=True))


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
    for mode in GATE_BLOCKS:
        assert np.isfinite(gate(mode, view)).all()


def test_lone_surrogates_and_empty_text_have_features() -> None:
    for text in ("", "\ud800", "\x00", "9" * 5000, "“" * 5000):
        assert np.isfinite(question(text)).all()


def test_a_megabyte_prompt_is_read_whole_and_in_seconds() -> None:
    text = "“'{1,2} = " * 100_000
    features = structure(text)
    assert features["chars"] == pytest.approx(np.log1p(len(text.strip())))
    assert features[f"mark_{ord('='):02x}"] == pytest.approx(np.log1p(100_000))
    assert np.isfinite(checked("1 + 1 " * 50_000)).all()


def test_counts_see_wording_and_not_the_numbers() -> None:
    base = ParsedQuestion.of(PromptView("What is 12 + 34?")).counts
    assert np.array_equal(base, ParsedQuestion.of(PromptView("what IS 56 + 78?")).counts)
    assert not np.array_equal(base, ParsedQuestion.of(PromptView("What is 12 - 34?")).counts)


@pytest.mark.parametrize("noise", [str.upper, str.title, lambda text: text.replace(" ", " \t "), "\n {}\n\n".format])
def test_casing_and_blanks_change_nothing(noise: Callable[[str], str]) -> None:
    asked = "Sort 3.5, 14 and 159: which “word” comes after 'aaab', please?"
    assert np.array_equal(question(asked), question(noise(asked)))


def test_the_question_is_found_in_a_chat_log() -> None:
    asked = "What is 12 + 34?"
    chat = f"<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    assert np.array_equal(question(asked), question(chat))


def test_quantities_say_how_large_and_how_long() -> None:
    features = structure("Order 7, 1234 and 0.5; then spell 'balloon' and “tree”.")
    assert features["largest_number"] == pytest.approx(np.log10(1235))
    assert features["smallest_number"] == pytest.approx(np.log10(1.5))
    assert features["sum_of_magnitudes"] == pytest.approx(np.log10(1235) + np.log10(8) + np.log10(1.5))
    assert (features["decimals"], features["distinct_numbers"]) == (1, 1)
    assert features["longest_quote"] == pytest.approx(np.log1p(4))
    assert features["longest_repeat"] == pytest.approx(np.log1p(2))
    assert structure("no numbers")["largest_number"] == 0


def test_gate_two_reads_only_the_first_tokens() -> None:
    view = run_view()
    long = replace(view, **{name: np.tile(getattr(view, name), 3) for name in ("logprobs", "entropies", "margins")})
    later = replace(long, answer="something else", answer_hidden=None)
    for name in ("logprobs", "entropies", "margins"):
        getattr(later, name)[OPENING_TOKENS:] *= 2
    assert np.array_equal(gate("opening", long), gate("opening", later))
    sooner = replace(long, logprobs=np.where(np.arange(15) == OPENING_TOKENS - 1, -9, long.logprobs))
    assert not np.array_equal(gate("opening", long), gate("opening", sooner))


def test_signal_statistics_match_numpy() -> None:
    rng = np.random.default_rng(0)
    logprobs = -rng.exponential(1.0, 23).astype(np.float32)
    view = replace(run_view(), logprobs=logprobs, entropies=-logprobs, margins=-logprobs)
    features = named(SIGNAL_NAMES, signals(view))
    windows = np.convolve(logprobs, np.ones(4) / 4, "valid")
    assert features["logprob_mean"] == pytest.approx(logprobs.mean(), rel=1e-5)
    assert features["logprob_q10"] == pytest.approx(np.quantile(logprobs, 0.1), rel=1e-5)
    assert features["logprob_worst_window"] == pytest.approx(windows.min(), rel=1e-5)
    assert features["logprob_slope"] == pytest.approx(np.polyfit(np.linspace(-0.5, 0.5, 23), logprobs, 1)[0], rel=1e-4)
    assert features["logprob_below_-1"] == pytest.approx(np.log1p((logprobs < -1).sum()))
    assert features["certainty_min"] == pytest.approx(logprobs.min(), rel=1e-5)


def test_impossible_signals_count_as_extreme() -> None:
    worst = np.array([-np.inf, np.nan], np.float32)
    view = replace(run_view(), logprobs=worst, entropies=-worst, margins=worst, prompt_logprobs=worst)
    features = named(SIGNAL_NAMES, signals(view)) | named(PROMPT_SIGNAL_NAMES, prompt_signals(worst))
    assert features["logprob_min"] == features["logprob_max"] == features["prompt_max"] == -30
    assert features["certainty_max"] == -15
    assert features["margin_max"] == 0


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
    features = named(ANSWER_NAMES, checked(answer))
    assert features["answer_statements"] == pytest.approx(np.log1p(statements))
    assert features["answer_false_statements"] == pytest.approx(np.log1p(false))


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
    features = named(ANSWER_NAMES, checked(answer, prompt))
    counted = ("bound", "misbound", "list_items", "statements", "false_statements")
    for name, value in expected.items():
        assert features[f"answer_{name}"] == pytest.approx(np.log1p(value) if name in counted else value), name


@pytest.mark.parametrize("text", ["a" * 200_000, "a, " * 100_000, "1 < " * 50_000, " " * 200_000, "1.1" * 60_000])
def test_answer_checks_read_long_answers_in_seconds(text: str) -> None:
    started = time.process_time()
    checked(text)
    assert time.process_time() - started < 10


def test_answer_checks_see_form() -> None:
    cut = named(ANSWER_NAMES, checked("again again again again"))
    assert cut["answer_repeats"] == pytest.approx(np.log1p(3))
    assert cut["answer_distinct_words"] == 0.25
    broken = named(ANSWER_NAMES, checked('{"a": [1, 2'))
    assert (broken["answer_json"], broken["answer_broken_json"], broken["answer_unbalanced"]) == (0, 1, 2)
    final = named(ANSWER_NAMES, checked("12 + 7 = 19. Answer: 23"))
    assert (final["answer_has_final"], final["answer_final_derived"]) == (1, 0)
    assert named(ANSWER_NAMES, checked("  "))["answer_empty"] == 1


def test_an_answer_that_was_cut_off_says_so() -> None:
    for reason, ended in (("length", 1), ("stop", 0)):
        run = ParsedRun.of(replace(run_view(), finish_reason=reason))
        assert BLOCKS["ending"].compute(run).tolist() == [ended]


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
