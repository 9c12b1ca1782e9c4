"""Policies that were calibrated on conversations: a follow-up is judged with what it follows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from updraft.classifier.evaluation.metrics import auroc
from updraft.classifier.features.blocks import BLOCKS, ParsedRun, prompt_of, view_of
from updraft.classifier.features.gate_inputs import EARLIER_TURNS, PromptView
from updraft.classifier.graded_row import GradedRow, gains
from updraft.classifier.grading.graded_data import read_graded, write_graded
from updraft.classifier.policy.policy import Policy, Source
from updraft.classifier.training.train import FitRecipe, fit_policy
from updraft.protocol.errors import InvalidRequestError
from updraft.protocol.requests import Message

RECIPE = FitRecipe({"local": "small", "cloud": "large"}, [Source("rows.jsonl", "0" * 64, 400)], "graded file")
HARD = ("Prove rigorously that every {} is compact.", "Derive the spectrum of the {} operator rigorously.")
EASY = ("Say hello to my {}.", "What colour is a ripe {}?")
FOLLOW_UPS = ("And why?", "Go on.", "Can you explain that?", "Are you sure?", "Say more, please.")
WORDS = ("river", "stone", "circle", "market", "window", "garden", "silver", "paper", "bridge", "candle")


def conversation(first: str, answer: str, follow_up: str) -> tuple[Message, ...]:
    return (
        Message(role="system", content="You are kind."),
        Message(role="user", content=first),
        Message(role="assistant", content=answer),
        Message(role="user", content=follow_up),
    )


def population(n: int, seed: int) -> list[GradedRow]:
    """Follow-ups that say nothing themselves: what they follow decides whether the local model can answer them."""
    rng = np.random.default_rng(seed)
    rows: list[GradedRow] = []
    for _ in range(n):
        hard = rng.random() < 0.4
        first = str(rng.choice(HARD if hard else EASY)).format(rng.choice(WORDS))
        asked = str(rng.choice(FOLLOW_UPS))
        weak = float(rng.random() < (0.15 if hard else 0.95))
        rows.append(GradedRow(asked, weak, 1.0, messages=conversation(first, "Well, yes.", asked)))
    return rows


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return fit_policy(population(400, 0), RECIPE, tmp_path_factory.mktemp("policy"))


def test_follow_up_why_depends_on_its_question(policy: Policy) -> None:
    hard, easy = (
        policy.before(PromptView.of(conversation(first, "Yes.", "And why?")))
        for first in ("Prove rigorously that every lamp is compact.", "What colour is a ripe lamp?")
    )
    assert hard > easy + 0.3


def test_follow_ups_rank_by_the_earlier_turn(policy: Policy) -> None:
    later = population(200, 1)
    p_gain = np.array([policy.before(prompt_of(row)) for row in later])
    assert auroc(p_gain, gains(later)) > 0.8


def test_the_card_says_how_long_the_conversations_were(policy: Policy) -> None:
    assert policy.calibrated_on.turns == 3
    assert "conversation" in policy.card.blocks["prompt"]
    longer = [*conversation("Say hello.", "Hello.", "And why?"), Message(role="assistant", content="I do.")]
    assert policy.calibrated_on.lacks(longer) == "conversations of 4 turns"
    assert policy.calibrated_on.lacks(longer[:-1]) is None


def test_single_question_keeps_its_features() -> None:
    asked = "What is 12 + 7?"
    alone = ParsedRun.of(view_of(GradedRow(asked, 0.0, 0.0)))
    first = ParsedRun.of(view_of(GradedRow(asked, 0.0, 0.0, messages=(Message(role="user", content=asked),))))
    for name, block in BLOCKS.items():
        assert np.array_equal(block.compute(alone), block.compute(first)), name
    assert not alone.question.conversation.any()


def test_only_the_last_turns_are_read_and_a_part_of_each() -> None:
    def turns(n: int, text: str) -> list[Message]:
        pair = (Message(role="user", content=text), Message(role="assistant", content="No." * 5_000))
        return [message for _ in range(n) for message in pair]

    last = Message(role="user", content="And why?")
    views = [PromptView.of([*turns(n, "What? " * 9_000), last]) for n in (EARLIER_TURNS, 40)]
    assert views[0] == views[1]
    assert len(views[0].key) < 10_000
    spaced = PromptView.of([*turns(1, "How many?"), last])
    assert spaced.key != PromptView.of([*turns(1, "How few?"), last]).key


def test_files_hold_conversations_and_prompts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [*population(3, 0), GradedRow("Hello?", 1.0, 1.0)]
    write_graded(path, rows)
    read = read_graded(path)
    assert [row.messages for row in read[:3]] == [row.messages for row in rows[:3]]
    assert [row.prompt for row in read] == [row.prompt for row in rows]
    assert read[3].messages == (Message(role="user", content="Hello?"),)


@pytest.mark.parametrize("messages", ["[]", '[{"role": "assistant", "content": "x"}]', '"x"', '[{"role": "king"}]'])
def test_invalid_conversations_are_refused_with_their_line(tmp_path: Path, messages: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"messages": {messages}, "weak": 1, "strong": 1}}\n')
    with pytest.raises(InvalidRequestError, match="line 1: messages must"):
        read_graded(path)
