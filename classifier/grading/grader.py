"""Grading of answer pairs: by reference answers, a judge model, sentence embeddings, or agreement."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ..arrays import Array
from ..features.sentence_embedding import EMBEDDING_MODEL
from .agreement import GRADING, ComparableAnswer, contradict, grades, is_free_text
from .judge import PairwiseJudge
from .questions import Prompt

BY_ANSWER = "reference answers of the file"
GraderName = Literal["reference", "judge", "embedding", "agreement"]
# Minimum cosine similarity of two replies that count as the same; a round number, not fitted to data.
SIMILAR = 0.8
_BY_EMBEDDING = (
    f"similarity of sentence embeddings ({EMBEDDING_MODEL}): the local answer counts as right if its cosine with the "
    f"cloud's is at least {SIMILAR:g}, and numbers and negations do not differ"
)


@dataclass(slots=True)
class PairGrader:
    """Grades answer pairs, and counts pairs per grader."""

    # Judge model that grades free text; None: no judge.
    judge: PairwiseJudge | None = None
    # Sentence embedding that grades free text without a judge; None: free text is graded by shared words.
    embed: Callable[[str], Array] | None = None
    graded: Counter[GraderName] = field(default_factory=Counter[GraderName])
    # Number of judged pairs that the other grader (embedding, else agreement) would have decided like the judge.
    matched: int = 0

    async def grade(self, prompt: Prompt, local: ComparableAnswer, cloud: ComparableAnswer) -> tuple[float, float]:
        """Return the scores of the local and the cloud's answer, in [0, 1]. Raises JudgementError."""
        if prompt.grade is not None:
            self.graded["reference"] += 1
            return float(prompt.grade(local.text)), float(prompt.grade(cloud.text))
        if not self.reads(local, cloud):
            self.graded["agreement"] += 1
            return grades(local, cloud)
        instead = grades(local, cloud) if self.embed is None else await self._by_meaning(self.embed, local, cloud)
        if self.judge is None:
            self.graded["embedding"] += 1
            return instead
        scores = await self.judge.scores(_transcript(prompt), local.text, cloud.text)
        self.graded["judge"] += 1
        self.matched += (scores[1] > scores[0]) == (instead[1] > instead[0])
        return scores

    def reads(self, local: ComparableAnswer, cloud: ComparableAnswer) -> bool:
        """Return whether the judge or the embedding grades this pair, provided that it has no reference answer."""
        return (self.judge is not None or self.embed is not None) and is_free_text(local, cloud)

    async def _by_meaning(
        self, embed: Callable[[str], Array], local: ComparableAnswer, cloud: ComparableAnswer
    ) -> tuple[float, float]:
        def similarity() -> float:
            return float(embed(local.text) @ embed(cloud.text))

        if contradict(local.text, cloud.text):
            return 0.0, 1.0
        return float(await asyncio.to_thread(similarity) >= SIMILAR), 1.0

    @property
    def matching(self) -> float | None:
        """Share of judged pairs that the other grader would have decided like the judge; None without judged pairs."""
        return self.matched / self.graded["judge"] if self.graded["judge"] else None

    def description(self) -> str:
        """Describe the graders used, as text for the policy's card and for users."""
        judge = "" if self.judge is None else self.judge.model
        names: dict[GraderName, str] = {
            "reference": BY_ANSWER,
            "judge": f"the judge {judge} (both orders of each pair, a tie if the two verdicts differ)",
            "embedding": _BY_EMBEDDING,
            "agreement": GRADING,
        }
        graders = [(names[name], self.graded[name]) for name in names if self.graded[name]]
        if len(graders) < 2:
            return graders[0][0] if graders else GRADING
        return "; ".join(f"{count} by {name}" for name, count in graders)


def _transcript(prompt: Prompt) -> str:
    """Return the request as plain text for the judge."""
    if not prompt.wire:
        return prompt.prompt
    return "\n\n".join(f"{message.role}: {message.text}" for message in prompt.messages)
