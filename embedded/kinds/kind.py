"""A task kind: a generator of questions, and how their answers are graded."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Draft:
    """A generated question before it is assigned to a split. `family` names the phrasing it was asked in."""

    family: str
    difficulty: int
    prompt: str
    answer: str
    target: str


class Phrasings:
    """Chooses the phrasing family of a question: common families by equal weight, rare ones by `rare_weight` each.

    `held_out`: ask outside the suite in the wordings that no model trains on.
    """

    def __init__(self, rng: random.Random, rare_weight: float, *, held_out: bool) -> None:
        self._rng = rng
        self._rare_weight = rare_weight
        self.held_out = held_out

    def pick(self, common: Sequence[str], rare: Sequence[str] = ()) -> str:
        weights = [1.0] * len(common) + [self._rare_weight] * len(rare)
        return self._rng.choices((*common, *rare), weights)[0]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of question."""

    name: str
    make: Callable[[random.Random, Phrasings], Draft]
    # `final` compares the text after the last "Answer:", `exact` the whole text, `json` the parsed value.
    grade: Literal["final", "exact", "json"] = "final"
    # The share of the training stream, relative to the other kinds.
    weight: float = 1.0


def worked(steps: str, target: object) -> str:
    """An answer that shows its steps and ends in the graded result."""
    return f"{steps} Answer: {target}"
