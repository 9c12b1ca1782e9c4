"""Tests by betting: whether routed answers score at least `quality` times the cloud's, at every moment.

A sampled row has Z = R - quality * C, with R the score of the routed answer and C that of the cloud's. A licence needs
evidence against E[Z] < 0: the wealth of a gambler who stakes the share b on each Z, averaged over several b (Waudby-
Smith & Ramdas 2024, "Estimating means of bounded random variables by betting"). Without a gain, wealth ever reaches
1/delta with probability at most delta (Ville 1939), so rows may be looked at one by one. A licence ends once the
evidence against E[Z] >= 0 since any earlier row is large (Shin, Ramdas & Rinaldo 2024, "E-detectors").
"""

from __future__ import annotations

from math import ceil, log

import numpy as np

from ..arrays import Bools, Floats

# Stakes as shares of the largest one, at which the worst row would lose everything, and their shares of the wealth.
# Tasks without errors need large stakes, and tasks near the target small ones.
_STAKES = np.array([0.03, 0.07, 0.15, 0.3, 0.5, 0.75, 0.95])
_SHARES = np.array([0.05, 0.1, 0.1, 0.1, 0.15, 0.15, 0.35])
# Stakes against the licence, and the shares of the wealth that they get. The largest one finds a collapse soon.
_STAKES_AGAINST = np.array([1.0, 0.4, 0.15, 0.05])
_SHARES_AGAINST = np.array([0.6, 0.2, 0.1, 0.1])
#: Evidence that ends a licence: a licence that keeps its promise ends once in at least this many sampled rows.
REVOKING_EVIDENCE = 1000.0


def num_licensed(worth: Floats, delta: float, quality: float, share: float = 1.0) -> int:
    """Return how many leading columns of `worth` (rows, steps) `LadderTest` licenses. Each entry is a row's Z.

    `share`: independent rows per row, if prompts repeat. A prompt with k copies counts 1/k for each: the mean of their
    logarithms is at most the logarithm of their mean, so this proves no more than the prompt's mean would.
    """
    log_wealth = share * np.cumsum(np.log1p(worth[:, :, None] * (_STAKES / quality)), axis=0)
    reached = (_log_mean(log_wealth) >= log(1.0 / delta)).any(axis=0)
    return int(reached.cumprod().sum())


def rows_to_license(worth: Floats, delta: float, quality: float) -> int | None:
    """Return about how many rows like `worth` (n,) license a step; None if more rows cannot help."""
    growth = float(np.log1p(worth[:, None] * (_STAKES / quality)).mean(axis=0).max())
    return ceil((log(1.0 / delta) - log(float(_SHARES.max()))) / growth) if growth > 0 else None


class LadderTest:
    """Tests of one frozen policy's steps, of which each keeps more requests local than the one before.

    A step is licensed once its wealth, and that of every step before, has reached 1 / `delta` (fixed-sequence testing:
    Angelopoulos et al. 2021, "Learn then Test"). So with probability 1 - `delta`, all licensed steps keep the quality.
    """

    def __init__(self, steps: int, quality: float, delta: float) -> None:
        self._quality, self._needed = quality, log(1.0 / delta)
        self._stakes = _STAKES / quality
        self._log_wealth = np.zeros((steps, len(_STAKES)))
        self._reached: Bools = np.zeros(steps, np.bool_)
        self._steps = np.arange(steps)

    @property
    def num_licensed(self) -> int:
        """Number of licensed steps; the last of them keeps most requests local."""
        return int(self._reached.argmin()) if not self._reached.all() else len(self._reached)

    @property
    def evidence(self) -> float:
        """Share of the needed evidence for the first step without a licence, on a scale of logarithms, at most 1."""
        step = min(self.num_licensed, len(self._steps) - 1)
        return float(np.clip(_log_mean(self._log_wealth)[step] / self._needed, 0.0, 1.0))

    def observe(self, local: float, cloud: float, first_step: int) -> None:
        """Add a sampled row: the scores of both answers, and the first step that keeps the row local."""
        routed = np.where(self._steps >= first_step, local, cloud)
        self._log_wealth += np.log1p(self._stakes * (routed - self._quality * cloud)[:, None])
        self._reached |= _log_mean(self._log_wealth) >= self._needed


class RevocationTest:
    """Watches a licence: `evidence` that routed answers miss the quality since any of the sampled rows."""

    def __init__(self, quality: float) -> None:
        self._quality = quality
        self._wealth = np.zeros(len(_STAKES_AGAINST))

    @property
    def evidence(self) -> float:
        return float(self._wealth @ _SHARES_AGAINST)

    @property
    def is_revoked(self) -> bool:
        return self.evidence >= REVOKING_EVIDENCE

    def observe(self, routed: float, cloud: float) -> None:
        """Add a sampled row: the score of the answer that the licensed step chooses, and that of the cloud's."""
        self._wealth = (self._wealth + 1.0) * (1.0 - _STAKES_AGAINST * (routed - self._quality * cloud))


def _log_mean(log_wealth: Floats) -> Floats:
    """Return the logarithm of the mean over the last dimension, which has the stakes."""
    highest = log_wealth.max(axis=-1)
    return highest + np.log(np.exp(log_wealth - highest[..., None]) @ _SHARES)
