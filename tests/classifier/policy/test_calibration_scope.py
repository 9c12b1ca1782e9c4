"""The scripts and turns that a calibration has seen."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from updraft.classifier.graded_row import GradedRow
from updraft.classifier.policy.calibration_scope import CalibrationScope, scripts_of
from updraft.classifier.policy.graph_files import CARD_NAME
from updraft.classifier.policy.policy import PolicyCard
from updraft.embedded.pocket import policy_folder
from updraft.protocol.requests import Message


def conversation(*roles: Any) -> tuple[Message, ...]:
    return tuple(Message(role=role, content="Go on.") for role in roles)


@pytest.mark.parametrize(
    ("text", "scripts"),
    [
        ("What is 2 + 2?", {"Latin"}),
        ("12 * (3 - 4) = ?", set()),
        ("Das Mädchen kann naïv sein, señor.", {"Latin"}),
        ("Ｆｕｌｌ ｗｉｄｔｈ", {"Latin"}),
        ("Is π above 3 μm, or Ω below ℝ?", {"Latin"}),
        ("καλημέρα", {"Greek"}),
        ("Почему?", {"Cyrillic"}),
        ("法国的首都是什么？", {"CJK"}),
        ("東京はどこですか", {"CJK", "Hiragana"}),
        ("ﾗｰﾒﾝ", {"Katakana"}),
        ("สวัสดี", {"Thai"}),
        ("ما هي عاصمة فرنسا؟", {"Arabic"}),
        ("नमस्ते", {"Devanagari"}),
        ("Translate 안녕 for me", {"Hangul", "Latin"}),
        ("👍🏽 … — ½", set()),
    ],
)
def test_scripts(text: str, scripts: set[str]) -> None:
    assert scripts_of(text) == scripts


def test_a_script_counts_from_thirty_prompts_on() -> None:
    prompts = ["What is this?"] * 100 + ["Что это?"] * 30 + ["นี่คืออะไร"] * 29
    assert CalibrationScope.of([GradedRow(prompt, 0.0, 0.0) for prompt in prompts]) == CalibrationScope(
        ("Cyrillic", "Latin"), turns=1
    )


def test_conversations_as_long_as_enough_of_the_rows() -> None:
    single = GradedRow("What is this?", 0.0, 0.0)
    follow_up = replace(single, messages=conversation("user", "assistant", "user"))
    for long, turns in ((29, 1), (30, 3)):
        assert CalibrationScope.of([follow_up] * long + [single] * 100).turns == turns


@pytest.mark.parametrize(
    ("roles", "lacks"),
    [
        (["user"], None),
        (["system", "user"], None),
        (["developer", "system", "user"], None),
        (["user", "user"], "conversations of 2 turns"),
        (["user", "assistant"], "conversations of 2 turns"),
        (["system", "user", "assistant", "user"], "conversations of 3 turns"),
    ],
)
def test_turns(roles: list[Any], lacks: str | None) -> None:
    messages = conversation(*roles)
    assert CalibrationScope().lacks(messages) == lacks
    assert CalibrationScope(turns=3).lacks(messages) is None


def test_instructions_are_read_too() -> None:
    messages = [Message(role="system", content="用中文回答。"), Message(role="user", content="What is a cat?")]
    assert CalibrationScope().lacks(messages) == "CJK script"


def test_a_card_that_says_nothing_is_of_english_questions() -> None:
    raw = json.loads((policy_folder() / CARD_NAME).read_text())
    raw.pop("calibrated_on", None)
    assert msgspec.convert(raw, PolicyCard).calibrated_on == CalibrationScope(("Latin",), 1)
