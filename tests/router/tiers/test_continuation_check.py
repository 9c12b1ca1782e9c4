"""A cloud's first words tell whether it goes on or begins anew; where they cannot, it counts as going on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.router.tiers.answer_shapes import Continuation

BEGUN = "The capital of France is"


def event(text: str, *, ends: bool = False) -> tuple[bytes, dict[str, Any]]:
    event = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop" if ends else None}]}
    return json.dumps(event).encode(), event


def read(begun: str, pieces: list[str]) -> tuple[str, str]:
    """The verdict, and what the caller is shown of the pieces."""
    continuation, verdict = Continuation(begun), "unknown"
    rest = list(pieces)
    while rest and verdict == "unknown":
        piece = rest.pop(0)
        verdict = continuation.take(event(piece, ends=not rest))
    shown = [each[1]["choices"][0]["delta"]["content"] for each in continuation.events]
    return verdict, "".join([*shown, *rest])


@pytest.mark.parametrize(
    ("begun", "pieces", "verdict", "shown"),
    [
        (BEGUN, [" Paris", "."], "continues", " Paris."),
        (BEGUN, ["The", " capital of France", " is Paris."], "repeats", " Paris."),
        (BEGUN, ["The capital", " of Italy is Rome."], "differs", "The capital of Italy is Rome."),
        (BEGUN, ["The", " one on the Seine."], "continues", "The one on the Seine."),
        (BEGUN, ["The"], "continues", "The"),
        ("1", ["1", "1"], "continues", "11"),
        ("ha", ["ha", " ha"], "continues", "ha ha"),
        ("0, 0, 0, 0, 0, ", ["0, 0, 0, 0, 0, ", "0"], "continues", "0, 0, 0, 0, 0, 0"),
    ],
)
def test_verdict_on_a_clouds_first_text(begun: str, pieces: list[str], verdict: str, shown: str) -> None:
    assert read(begun, pieces) == (verdict, shown)


@given(st.text(max_size=40), st.lists(st.text(max_size=8), min_size=1, max_size=8))
def test_only_the_repeated_text_is_dropped(begun: str, pieces: list[str]) -> None:
    verdict, shown = read(begun, pieces)
    whole = "".join(pieces)
    assert verdict != "unknown"
    assert shown == whole if verdict != "repeats" else (begun.lstrip() + shown).endswith(whole.lstrip())
