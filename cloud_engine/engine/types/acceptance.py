"""The chance that a drafter's tokens are accepted, by what was seen."""

from __future__ import annotations

_PRIOR = 0.7  # acceptance of a drafter of which nothing is known
_PRIOR_WEIGHT = 8.0  # tested tokens that a prior counts as
_REQUEST_HORIZON, _DRAFTER_HORIZON = 64, 512  # tested tokens after which a result is all but forgotten


class Acceptance:
    """The share of tested draft tokens that the target accepted; old ones fade. Behind a refuted one none is tested."""

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

    @classmethod
    def of_drafter(cls) -> Acceptance:
        """Over all requests: the prior of a new one."""
        return cls(_DRAFTER_HORIZON)
