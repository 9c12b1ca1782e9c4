"""Which graded rows fit the gates, and which are kept from them, so that their thresholds mean what they say.

Thresholds on rows that helped to fit a gate promise too much: the gate knows these rows, wording included (decision
059). So the rows to promise on are divided at random, and no row that asks the same as a held-out one is fitted to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .router_model import Labels

__all__ = ["HELD_OUT", "divided"]

# Of the rows to promise on. Simulated populations chose it (`updraft bench guarantee`).
HELD_OUT = 0.5


def divided(labels: Labels, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The rows to fit on and those to calibrate on, which are representative ones; both rising.

    Rows that ask the same as a held-out one and are not representative are in neither.
    """
    same = np.arange(len(labels.weak))
    if labels.same is not None:  # the first row that asks it
        _, first, groups = np.unique(labels.same, return_index=True, return_inverse=True)
        same = first[groups]
    drawn = np.unique(same[labels.even])
    held = np.random.default_rng(seed).permutation(drawn)[: round(HELD_OUT * len(drawn))]
    kept_out = np.isin(same, held)
    return np.flatnonzero(~kept_out), labels.even[kept_out[labels.even]]
