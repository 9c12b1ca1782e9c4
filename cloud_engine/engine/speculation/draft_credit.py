"""The credit of drafts: whatever is believed of them, they have never cost more than a small share.

A policy that learns from what it tries pays for it. Here it may only spend what it has earned: a share of the time, and
what drafts have gained. So at any moment, and for batches of any size, all steps so far took little longer than without
drafts (conservative exploration: Wu, Shariff, Lattimore and Szepesvari, "Conservative Bandits", ICML 2016).
"""

from __future__ import annotations

_FIRST = 3.0  # before anything is earned
_SHARE = 0.01  # earned with every step
_MAX_CREDIT = 64.0  # that is kept for later
_OVERDRAFT = 3.0  # from here on there are no drafts, until it is made up for


class DraftCredit:
    """By class of batch size, in steps without drafts."""

    def __init__(self) -> None:
        self._credit: dict[int, float] = {}
        self._overdrawn: set[int] = set()

    def of(self, sequences: int) -> float:
        return self._credit.get(sequences.bit_length(), _FIRST)

    def is_overdrawn(self, sequences: int) -> bool:
        """Whether drafts have lost too much, and not been made up for since."""
        return sequences.bit_length() in self._overdrawn

    def settle(self, sequences: int, loss: float = 0.0) -> None:
        """A step has passed, which drafts have made so much longer, for each token that came out of it."""
        size = sequences.bit_length()
        credit = self._credit[size] = min(self.of(sequences) + _SHARE - loss, _MAX_CREDIT)
        if credit < -_OVERDRAFT:
            self._overdrawn.add(size)
        elif credit >= 0:
            self._overdrawn.discard(size)
