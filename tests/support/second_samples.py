"""A population whose second samples have a known law, and the opinions that are fitted on draws of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnxruntime
from updraft.classifier.calibration_rows import CalibrationRows
from updraft.classifier.guarantee import graded
from updraft.classifier.metrics import Bools, Floats
from updraft.classifier.second import SecondOpinion
from updraft.classifier.second_fit import FittedSecond, agreements, fit_second

FIRST, SAME, OTHER = "It is 12.", "It is 12.", "Maybe 7, or so."
# How often the second answer is the same where the cloud's is better, and where it is not.
SAME_IF_GAIN, SAME_IF_NOT = 0.3, 0.8


@dataclass(frozen=True)
class Draw:
    """(n,) each: P(gain) of gate 3, which is true, whether there is a gain, whether the second answer is the same."""

    p_gain: Floats
    gain: Bools
    same: Bools

    @classmethod
    def of(cls, n: int, seed: int) -> Draw:
        rng = np.random.default_rng(seed)
        p_gain = rng.beta(0.6, 2.0, n)
        gain = rng.random(n) < p_gain
        return cls(p_gain, gain, rng.random(n) < np.where(gain, SAME_IF_GAIN, SAME_IF_NOT))

    def fitted(self, *, informative: bool = True) -> FittedSecond | None:
        same = self.same if informative else np.random.default_rng(7).permutation(self.same)
        agreed = agreements((FIRST, SAME if each else OTHER) for each in same)
        return fit_second(self.p_gain, agreed, self.gain)

    def rows(self, second: FittedSecond) -> CalibrationRows:
        return replace(graded(self.gain, self.p_gain, after=self.p_gain), again=second.again)


def chance_of_same(p_gain: float) -> float:
    return p_gain * SAME_IF_GAIN + (1 - p_gain) * SAME_IF_NOT


def opinion(fitted: FittedSecond) -> SecondOpinion:
    return SecondOpinion(fitted.card, onnxruntime.InferenceSession(fitted.graph, providers=["CPUExecutionProvider"]))
