"""Who grades a pair of answers: the file's reference, a judge for free text, or agreement with the cloud."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from .agreement import GRADING, ComparableAnswer, grades, is_free_text
from .judge import PairwiseJudge
from .questions import Prompt

__all__ = ["BY_ANSWER", "GraderName", "PairGrader"]

BY_ANSWER = "reference answers of the file"
GraderName = Literal["reference", "judge", "agreement"]


@dataclass(slots=True)
class PairGrader:
    """Grades pairs, and remembers who graded how many."""

    # For free text.
    judge: PairwiseJudge | None = None
    graded: Counter[GraderName] = field(default_factory=Counter[GraderName])
    # Judged pairs on which agreement says the same.
    matched: int = 0

    async def grade(self, prompt: Prompt, local: ComparableAnswer, cloud: ComparableAnswer) -> tuple[float, float]:
        """The scores of the local and of the cloud's answer, in [0, 1]. Raises JudgementError."""
        if prompt.grade is not None:
            self.graded["reference"] += 1
            return float(prompt.grade(local.text)), float(prompt.grade(cloud.text))
        instead = grades(local, cloud)
        if self.judge is None or not is_free_text(local, cloud):
            self.graded["agreement"] += 1
            return instead
        scores = await self.judge.scores(_transcript(prompt), local.text, cloud.text)
        self.graded["judge"] += 1
        self.matched += (scores[1] > scores[0]) == (instead[1] > instead[0])
        return scores

    @property
    def matching(self) -> float | None:
        """How often judge and agreement say the same of whether the cloud is better."""
        return self.matched / self.graded["judge"] if self.graded["judge"] else None

    def description(self) -> str:
        """For the card, and for people."""
        judge = "" if self.judge is None else self.judge.model
        names: dict[GraderName, str] = {
            "reference": BY_ANSWER,
            "judge": f"the judge {judge}, both orders of each pair, a tie where they differ",
            "agreement": GRADING,
        }
        graders = [(names[name], self.graded[name]) for name in names if self.graded[name]]
        if len(graders) < 2:
            return graders[0][0] if graders else GRADING
        return "; ".join(f"{count} by {name}" for name, count in graders)


def _transcript(prompt: Prompt) -> str:
    """The request as the judge reads it."""
    if not prompt.wire:
        return prompt.prompt
    return "\n\n".join(f"{message.role}: {message.text}" for message in prompt.messages)
