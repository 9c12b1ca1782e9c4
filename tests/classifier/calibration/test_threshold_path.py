"""The path of thresholds against its definition, row by row, and the walk along it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.classifier.arrays import Bools, Floats
from updraft.classifier.calibration.rows import CalibrationRows
from updraft.classifier.calibration.threshold_path import ALWAYS, NEVER, ThresholdPath, Thresholds, escalated


def rows(n: int, gates: int, seed: int, *, coarse: bool = False) -> CalibrationRows:
    p_gain = np.random.default_rng(seed).random((3, n))
    before, during, after = np.round(p_gain, 1) if coarse else p_gain
    ones = np.ones(n)
    return CalibrationRows(before, after if gates > 1 else None, ones, ones, ones, ones, during if gates == 3 else None)


def step(path: ThresholdPath, k: int) -> Thresholds:
    return Thresholds(path.before[k], path.during[k], path.after[k])


def least_wasteful(early: Floats, kept: Bools, allowed: int) -> float:
    rivals = np.sort(early[kept])[::-1]
    return float(rivals[allowed]) if len(rivals) > allowed else ALWAYS


@given(st.integers(1, 250), st.integers(1, 3), st.integers(0, 1000), st.booleans())
def test_each_step_sends_up_what_its_thresholds_say(n: int, gates: int, seed: int, coarse: bool) -> None:
    judged = rows(n, gates, seed, coarse=coarse)
    path = ThresholdPath.of(judged)
    up = np.array([escalated(judged, step(path, k)) for k in range(len(path.after))])
    assert up[0].all() and not up[-1].any()
    assert (up == (path.stays > np.arange(len(up))[:, None])).all()
    assert (up[1:] <= up[:-1]).all(), "what stays at one step stays at the next"
    worth = np.random.default_rng(seed).random((2, n))
    assert path.sums(*worth) == pytest.approx(np.where(up, worth[1], worth[0]).sum(axis=1))
    assert (path.sums(np.ones(n, np.bool_)) == (~up).sum(axis=1)).all()


@pytest.mark.parametrize("coarse", [False, True])
def test_early_gates_send_up_as_much_as_they_may(coarse: bool) -> None:
    judged = rows(450, 3, 0, coarse=coarse)
    path = ThresholdPath.of(judged)
    assert judged.after is not None and judged.during is not None
    for k, level in enumerate(path.after[:-1]):
        kept = judged.after <= level
        assert path.before[k] == least_wasteful(judged.before, kept, 4)
        assert path.during[k] == least_wasteful(judged.during, kept, 4)
    assert step(path, -1) == Thresholds(NEVER, NEVER, NEVER)


@pytest.mark.parametrize(
    ("holds", "there", "back"),
    [([1, 1, 0, 1], 1, 3), ([0, 1, 1, 1], 0, 1), ([1, 1, 1, 0], 2, 3), ([1, 1, 1, 1], 3, 0), ([0, 0, 0, 0], 0, 3)],
)
def test_the_walk_stops_before_the_first_that_does_not_hold(holds: list[int], there: int, back: int) -> None:
    path = ThresholdPath.of(rows(2, 1, 0))
    shown = np.array(holds, np.bool_)
    assert path.walk(shown) == step(path, there)
    assert path.walk(shown, back=True) == step(path, back)
