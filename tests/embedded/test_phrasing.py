"""Questions keep their meaning in whatever words, case and blanks people type."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from updraft.embedded.kinds import KINDS, Phrasings
from updraft.embedded.phrasing import rephrase
from updraft.embedded.tasks import make_tasks, split_of

DRAWS = 20_000


def typed(prompt: str, kind: str) -> set[str]:
    rng = random.Random(0)
    return {rephrase(prompt, kind, rng) for _ in range(DRAWS)}


@pytest.mark.parametrize(
    ("kind", "prompt", "forms"),
    [
        ("add", "What is 17 + 25?", ("17+25", "17 + 25", "what is 17+25?", "what's 17 plus 25?", "17 + 25 =\n")),
        ("add", "How much is 2 plus 2?", ("2+2", "2 + 2 ", "two plus two", "2 + 2?")),
        ("multiply", "What is 12 * 12?", ("12*12", "12 x 12", "what is 12 times 12?", "12\u00d712")),
        ("subtract", "Take 9 and subtract 4.", ("9-4", "what is 9 minus 4?", "9 - 4?")),
        ("capital", "What is the capital of France?", ("capital of france", "what is the capital of france?\n")),
        ("weekday", "It is Monday. What weekday will it be 5 days from now?", ("What day is 5 days after Monday?",)),
    ],
)
def test_a_question_is_asked_the_way_people_type(kind: str, prompt: str, forms: tuple[str, ...]) -> None:
    assert set(forms) <= typed(prompt, kind)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"outside"}))
def test_paraphrases_keep_the_question(kind: str) -> None:
    """Every figure of a question stays in it, and so do its names and letters."""
    rng = random.Random(kind)
    for _ in range(400):
        prompt = KINDS[kind].make(rng, Phrasings(rng, 0.3, held_out=False)).prompt
        other = rephrase(prompt, kind, rng)
        small = re.search(r"one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|teen|zero", other.casefold())
        if not small:
            assert Counter(re.findall(r"\d", other)) == Counter(re.findall(r"\d", prompt)), (prompt, other)
        if kind == "json":
            assert set(re.findall(r"[A-Z][a-z]+(?=[ .,])", prompt)) - {"Give"} <= set(re.findall(r"[A-Z][a-z]+", other))


def test_about_half_of_all_tasks_are_rephrased_in_every_split() -> None:
    for split in ("train", "calibration", "test"):
        tasks = make_tasks(split, 1000)
        odd = [t for t in tasks if t.prompt != t.prompt.strip() or t.prompt[0].islower() or t.prompt[-1] not in "?.!"]
        assert 0.25 < len(odd) / len(tasks) < 0.7


def test_case_blanks_and_signs_do_not_move_a_question_to_another_split() -> None:
    for prompt in ("What is 12 * 12?", "It is 9:05. What time is it 2 h 5 min later?"):
        assert (
            split_of(prompt) == split_of(f" {prompt.upper()}\n") == split_of(re.sub(r"(?<=\d) (?=[hm*])", "", prompt))
        )
