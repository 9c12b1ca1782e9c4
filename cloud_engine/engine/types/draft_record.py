"""Drafting statistics of a request: counts, acceptance rates, and an index of the n-grams in its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_PRIOR, _PRIOR_WEIGHT = 0.7, 6  # acceptance rate assumed for a new drafter, and its weight in tested tokens
_HORIZON = 20  # tested tokens over which the moving average reaches
_NGRAM = 3  # tokens per n-gram


class Acceptance:
    """The moving average of the share of tested draft tokens that the target accepted.

    Tokens after a rejection are untested.
    """

    __slots__ = ("_weight", "mean")

    def __init__(self, prior: float = _PRIOR) -> None:
        self.mean = prior
        self._weight = _PRIOR_WEIGHT

    def add(self, accepted: int, proposed: int) -> None:
        tested = min(accepted + 1, proposed)
        self._weight = min(self._weight + tested, _HORIZON)
        self.mean += min(1.0, tested / self._weight) * (accepted / tested - self.mean)


def num_assumed(num_pending: int, predicted: Sequence[int], unread_drafts: Sequence[int]) -> int:
    """Return how many tokens the unread step probably adds: all `num_pending`, or 1 if its drafts are outdated.

    `predicted`: the next tokens as predicted now, at most `num_pending`. Drafts that differ were proposed before the
    step before the unread one rejected others.
    """
    is_outdated = list(predicted[1:]) != list(unread_drafts[: max(0, len(predicted) - 1)])
    return min(num_pending, 1) if is_outdated else num_pending


class NgramIndex:
    """Maps each n-gram of `_NGRAM` tokens to the position after its latest occurrence, if a token follows there.

    Each token is indexed once and adds at most one entry.
    """

    __slots__ = ("_follows", "_read")

    def __init__(self) -> None:
        self._follows: dict[tuple[int, ...], int] = {}
        self._read = _NGRAM  # position up to which tokens are indexed

    def find(self, token_ids: Sequence[int] | NDArray[np.int32]) -> int | None:
        """Return the position after an earlier copy of the text's last n-gram. The text may only grow between calls."""
        for position in range(self._read, len(token_ids)):
            self._follows[tuple(token_ids[position - _NGRAM : position])] = position
        self._read = max(self._read, len(token_ids))
        return self._follows.get(tuple(token_ids[-_NGRAM:]))


@dataclass(slots=True, eq=False)
class DraftRecord:
    """Drafting statistics of one answer."""

    proposed: int = 0
    accepted: int = 0
    # Acceptance rate by drafter name.
    acceptance: dict[str, Acceptance] = field(default_factory=dict[str, Acceptance])
    ngrams: NgramIndex = field(default_factory=NgramIndex)
