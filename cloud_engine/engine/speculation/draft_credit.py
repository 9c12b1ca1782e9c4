"""Credit that bounds the time lost to drafts.

Learning by trial loses time on bad tries. Trials may only spend earned credit: a small share of each step, and
the time that drafts have saved. So at any moment, for any batch size, all steps so far took little longer than they
would have without drafts (Wu, Shariff, Lattimore and Szepesvari, "Conservative Bandits", ICML 2016).
"""

from __future__ import annotations

_FIRST = 3.0  # initial credit, in steps without drafts
_SHARE = 0.01  # credit earned per step
_MAX_CREDIT = 64.0  # upper limit of the credit
_OVERDRAFT = 3.0  # debt that suspends drafts until the credit is back at 0


class DraftCredit:
    """Credit for each class of batch sizes (powers of two). The unit is the time of a step without drafts."""

    def __init__(self) -> None:
        self._credit: dict[int, float] = {}
        self._overdrawn: set[int] = set()

    def of(self, sequences: int) -> float:
        return self._credit.get(sequences.bit_length(), _FIRST)

    def is_overdrawn(self, sequences: int) -> bool:
        """Return whether drafts are suspended because they have lost too much time."""
        return sequences.bit_length() in self._overdrawn

    def settle(self, sequences: int, loss: float = 0.0) -> None:
        """Account for a step in which drafts lost `loss` (negative: gained), in units of a step without drafts."""
        size = sequences.bit_length()
        credit = self._credit[size] = min(self.of(sequences) + _SHARE - loss, _MAX_CREDIT)
        if credit < -_OVERDRAFT:
            self._overdrawn.add(size)
        elif credit >= 0:
            self._overdrawn.discard(size)
