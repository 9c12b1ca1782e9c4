"""The estimated probability that a drafter's tokens are accepted."""

from __future__ import annotations

_PRIOR = 0.7  # acceptance rate assumed for a new drafter
_PRIOR_WEIGHT = 8.0  # weight of the prior, in tested tokens
_REQUEST_HORIZON = 64  # decay length of past results, in tested tokens
#: Decay length of a drafter's record over all requests. The record serves as the prior of a new request.
DRAFTER_HORIZON = 512


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
