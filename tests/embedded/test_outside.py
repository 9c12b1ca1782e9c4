"""Questions outside the suite: many wordings, one answer, and evaluation asks what training never did."""

from __future__ import annotations

import random

from updraft.embedded.kinds import KINDS, Phrasings
from updraft.embedded.kinds.facts import ATLAS
from updraft.embedded.kinds.kind import Draft
from updraft.embedded.kinds.outside import OUTSIDE
from updraft.embedded.tasks import check, make_tasks


def drafts(*, held_out: bool, n: int = 6000) -> list[Draft]:
    rng = random.Random(3)
    return [KINDS["outside"].make(rng, Phrasings(rng, 0.3, held_out=held_out)) for _ in range(n)]


def test_the_answer_is_one_sentence_and_graded_as_such() -> None:
    assert OUTSIDE.count(".") == 1
    assert {draft.answer for draft in drafts(held_out=True)} == {OUTSIDE}
    task = next(task for task in make_tasks("test", 200) if task.kind == "outside")
    assert check(task, OUTSIDE)
    assert not check(task, "Goodbye! Come back with another question.")


def test_evaluation_asks_in_wordings_that_training_does_not_know() -> None:
    """No whole sentence is in both; of a question with a slot, neither its frame nor its filling."""
    trained, kept = (
        {d.prompt.casefold() for d in drafts(held_out=held_out) if d.family in ("whole", "language", "to-do", "about")}
        for held_out in (False, True)
    )
    assert not trained & kept
    assert len(kept) > 300
    assert len(trained) > 2500


def test_nothing_that_the_suite_knows_is_called_outside() -> None:
    known = {name.casefold() for row in ATLAS for name in row[:2]}
    for draft in drafts(held_out=False) + drafts(held_out=True):
        prompt = draft.prompt.casefold()
        if draft.family == "no-country":
            assert not any(f"of {name}?" in prompt or f"of {name}." in prompt for name in known), prompt
    suite = {task.prompt.casefold() for task in make_tasks("train", 4000) if task.kind != "outside"}
    assert not suite & {draft.prompt.casefold() for draft in drafts(held_out=False)}
