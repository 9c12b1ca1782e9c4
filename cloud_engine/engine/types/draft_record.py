"""Drafting statistics of a request: counts, acceptance rates, and an index of the n-grams in its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_PRIOR = 0.7  # acceptance rate assumed for a new drafter
_PRIOR_WEIGHT = 8.0  # weight of the prior, in tested tokens
_REQUEST_HORIZON = 64  # tested tokens over which past results decay
#: Tested tokens over which a drafter's record over all requests decays. This record is the prior of new requests.
DRAFTER_HORIZON = 512
_NGRAM = 3  # tokens per n-gram


class Acceptance:
    """The decaying share of tested draft tokens that the target accepted. Tokens after a rejection are untested."""

    __slots__ = ("_accepted", "_horizon", "_tested")

    def __init__(self, horizon: int = _REQUEST_HORIZON) -> None:
        self._horizon = horizon
        self._accepted = self._tested = 0.0

    def add(self, accepted: int, proposed: int) -> None:
        tested = min(accepted + 1, proposed)
        fade = max(0.0, 1 - tested / self._horizon)
        self._accepted = self._accepted * fade + accepted
        self._tested = self._tested * fade + tested

    def estimate(self, prior: float = _PRIOR) -> float:
        return (self._accepted + _PRIOR_WEIGHT * prior) / (self._tested + _PRIOR_WEIGHT)


class NgramIndex:
    """Maps each n-gram of `_NGRAM` tokens to the position after its latest occurrence, if a token follows there.

    Each token is indexed once and adds at most one entry.
    """

    __slots__ = ("_follows", "_read")

    def __init__(self) -> None:
        self._follows: dict[tuple[int, ...], int] = {}
        self._read = _NGRAM  # position up to which tokens are indexed

    def find(self, token_ids: Sequence[int]) -> int | None:
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
