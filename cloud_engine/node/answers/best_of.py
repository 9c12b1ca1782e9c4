"""OpenAI's `best_of`: generates more answers than it returns, and bills all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf

import msgspec

from ....protocol.responses import ChatCompletion, TextCompletion
from .answer_stream import Piece, total_usage
from .formats import WrappedFormat


@dataclass(slots=True)
class BestOf(WrappedFormat):
    """Returns the `n` of each prompt's `best_of` answers that have the best mean log-probability. Not for streams."""

    n: int
    best_of: int

    def whole(self, answers: Sequence[Piece]) -> msgspec.Struct:
        chosen: list[Piece] = []
        for number, group in groupby(answers, key=lambda answer: answer.index // self.best_of):
            ranked = sorted(group, key=_logprob_per_token, reverse=True)[: self.n]
            chosen += [replace(answer, index=number * self.n + rank) for rank, answer in enumerate(ranked)]
        # The scores of a prompt come with its first generated answer. Move them to the first chosen answer.
        for answer in answers:
            if answer.prompt_scores:
                chosen[answer.index // self.best_of * self.n].prompt_scores = answer.prompt_scores
        shown = self.answers.whole(chosen)
        if isinstance(shown, ChatCompletion | TextCompletion):
            shown.usage = total_usage(answers)
        return shown


def _logprob_per_token(answer: Piece) -> float:
    """Return the mean log-probability per token; -inf for an answer without tokens, to rank it last."""
    scores = [scored.score.logprob for scored in answer.scores]
    return sum(scores) / len(scores) if scores else -inf
