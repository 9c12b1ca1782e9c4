"""Task kind: a generator of questions, and the grading of their answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Draft:
    """A generated question before its assignment to training, calibration or test. `family`: its phrasing family."""

    family: str
    difficulty: int
    prompt: str
    answer: str
    target: str


class Phrasings:
    """Chooses the phrasing family of a question: common families with weight 1, rare families with `rare_weight` each.

    `held_out`: for kind `outside`, use the wordings that no model trains on.
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
    """A kind of question: its generator, grading and weight."""

    name: str
    make: Callable[[random.Random, Phrasings], Draft]
    # `final` compares the text after the last "Answer:", `exact` the whole text, `json` the parsed value.
    grade: Literal["final", "exact", "json"] = "final"
    # Weight in the training stream, relative to the other kinds.
    weight: float = 1.0


def worked(steps: str, target: object) -> str:
    """Return an answer that shows its steps and ends in the graded result."""
    return f"{steps} Answer: {target}"
