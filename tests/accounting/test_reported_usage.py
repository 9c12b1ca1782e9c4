"""Token counts that servers report: names of several APIs, counts that leave out reasoning, and nested reports."""

from __future__ import annotations

from typing import Any

import pytest
from updraft.accounting.reported_usage import ReportedUsage
from updraft.protocol.responses import MAX_TOKENS


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}, (7, 3)),
        ({"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 2010}, (7, 2003)),
        ({"prompt_tokens": 7, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 90}}, (7, 93)),
        ({"prompt_tokens": 7, "completion_tokens": 93, "completion_tokens_details": {"reasoning_tokens": 90}}, (7, 93)),
        ({"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": "many"}, (7, 3)),
        ({"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 2 * MAX_TOKENS}, (7, 3)),
        ({"prompt_tokens": 7.0, "completion_tokens": "3", "total_tokens": "10"}, (7, 3)),
        ({"prompt_tokens": "7", "completion_tokens": 3.0, "total_tokens": "\u0663"}, (7, 3)),
        ({"prompt_tokens": 7, "total_tokens": 7}, (7, 0)),
        ({"completion_tokens": 3, "total_tokens": 10}, (5, 5)),
        ({"total_tokens": 100}, (5, 95)),
        ({"total_tokens": 4}, (4, 0)),
        ({"input_tokens": 7, "output_tokens": 3}, (7, 3)),
        ({"input_tokens": 7, "cache_read_input_tokens": 20, "cache_creation_input_tokens": 1}, (28, 0)),
        ({"prompt_tokens": 27, "completion_tokens": 3, "cache_read_input_tokens": 20}, (27, 3)),
        (
            {"input_tokens": 7, "output_tokens": 3, "iterations": [{"input_tokens": 90, "output_tokens": 4}] * 2},
            (180, 8),
        ),
        ({"input_tokens": 7, "output_tokens": 3, "iterations": [{"cache_read_input_tokens": 4}, {}]}, (11, 3)),
        ({"input_tokens": 7, "output_tokens": 3, "iterations": [1]}, (7, 3)),
    ],
)
def test_the_tokens_of_a_usage(usage: dict[str, Any], tokens: tuple[int, int]) -> None:
    """The estimate of the prompt, 5 tokens, is used only where the prompt is missing."""
    read = ReportedUsage.of({"usage": usage}, prompt_estimate=5)
    assert read is not None and (read.prompt_tokens, read.completion_tokens) == tokens


@pytest.mark.parametrize(
    "usage", [{"prompt_tokens": -1}, {"completion_tokens": 1.5}, {"prompt_tokens": True}, {"output_tokens": "9.0"}]
)
def test_an_impossible_count_is_no_usage(usage: dict[str, Any]) -> None:
    assert ReportedUsage.of({"usage": {"prompt_tokens": 1, **usage}}) is None


@pytest.mark.parametrize("usage", [{}, {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}])
def test_a_usage_without_tokens_reports_nothing(usage: dict[str, Any]) -> None:
    assert not ReportedUsage.of({"usage": usage})
    assert ReportedUsage.of({"usage": usage, "x": {"usage": {"prompt_tokens": 2}}}) == ReportedUsage(2)


@pytest.mark.parametrize(
    "cached",
    [
        {"prompt_tokens_details": {"cached_tokens": 4}},
        {"input_tokens_details": {"cached_tokens": 4}},
        {"cached_tokens": 4},
        {"prompt_cache_hit_tokens": 4, "prompt_cache_miss_tokens": 5},
        {"cache_read_input_tokens": 4},
    ],
)
def test_cached_tokens(cached: dict[str, Any]) -> None:
    read = ReportedUsage.of({"usage": {"prompt_tokens": 9, "completion_tokens": 1, **cached}})
    assert read == ReportedUsage(9, 1, cached_tokens=4)
    most = ReportedUsage.of({"usage": {"prompt_tokens": 3, **cached}})
    assert most is not None and most.cached_tokens == 3, "at most the prompt"


USAGE = {"prompt_tokens": 9, "completion_tokens": 1}


@pytest.mark.parametrize(
    "event",
    [
        {"usage": USAGE},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "usage": USAGE}]},
        {"choices": [{"delta": {"usage": USAGE}}], "usage": None},
        {"choices": [], "x_groq": {"id": "r", "usage": USAGE}},
        {"a": {"b": [{"c": {"usage": USAGE}}]}, "usage": {"prompt_tokens": -1}},
        {"usage": USAGE, "x_groq": {"usage": {"prompt_tokens": 1}}},
    ],
)
def test_usage_is_found_at_any_depth(event: dict[str, Any]) -> None:
    assert ReportedUsage.of(event) == ReportedUsage(9, 1)


def test_words_of_a_model_are_no_usage() -> None:
    """Some servers write arguments as objects."""
    forged = {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    call = {"function": {"name": "f", "arguments": forged}}
    for part in ({"tool_calls": [call]}, {"function_call": forged}, {"content": [{"input": forged}]}):
        assert ReportedUsage.of({"choices": [{"message": part, "delta": part}]}) is None
        assert ReportedUsage.of({"choices": [{"message": part}], "x": {"usage": USAGE}}) == ReportedUsage(9, 1)
