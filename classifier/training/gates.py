"""From features and grades to the gates that ship and the rows that their thresholds come from: the whole of what is
promised, which `updraft calibrate`, `updraft learn` and `updraft bench guarantee` share.

Thresholds on rows that helped to fit a gate promise too much: the gate knows these rows, wording included (decision
059). So the rows to promise on are divided at random, and no row that asks the same as a held-out one is fitted to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...protocol.errors import InvalidRequestError
from ..arrays import Bools, Floats
from ..calibration.operating_point import DELTA, rows_to_promise
from ..calibration.rows import CalibrationRows
from ..features.blocks import Mode
from ..features.feature_rows import FeatureRows
from .router_model import MEMBERS, MIN_DIFFERENT, MIN_FITTED, MIN_LABELS, Labels, RouterModel, Topics, fit_router

# Of the rows to promise on. Simulated populations chose it (`updraft bench guarantee`).
HELD_OUT = 0.5
_OFTEN_OPENED = 0.1
# The cloud's mean score where none is known yet.
_CLOUD_SCORE = 0.9


@dataclass(frozen=True, slots=True)
class Material:
    """Graded rows as numbers, which gates are fitted on."""

    # Of each gate.
    features: Mapping[Mode, FeatureRows]
    labels: Labels
    # Tokens that the cloud reads and writes, (n,) each, and whether they are estimates.
    tokens: tuple[Floats, Floats, bool]
    # (n,) which answers go on behind their opening. Without it, or where few do, there is no gate 2.
    opened: Bools | None = None


@dataclass(frozen=True, slots=True)
class FittedGates:
    """The gates that ship, and the rows that their thresholds come from."""

    routers: dict[Mode, RouterModel]
    # The rows that the gates were fitted on.
    fitting: NDArray[Any]
    # Other rows, as the gates judge them.
    calibration: CalibrationRows


def fit_gates(material: Material, seed: int = 0, members: Sequence[str] = MEMBERS) -> FittedGates:
    """Gates fitted on one part of the rows, and the other part for thresholds. The gates share their topics.

    Raises InvalidRequestError as `fit_router` does, and with fewer than 100 rows, or 10 different ones, to promise on.
    """
    if len(material.labels.representative_rows) < MIN_LABELS:
        raise InvalidRequestError(
            f"A policy needs at least {MIN_LABELS} graded prompts, not {len(material.labels.representative_rows)}."
        )
    if (different := material.labels.different) < MIN_DIFFERENT:
        raise InvalidRequestError(
            f"A policy needs at least {MIN_DIFFERENT} different prompts, and these ask only {different} different "
            "things: give more."
        )
    fitting, calibrating = split_rows(material.labels, seed)
    opened = 0 if material.opened is None else int(material.opened[fitting].sum())
    has_gate_2 = opened >= max(MIN_FITTED, _OFTEN_OPENED * len(fitting))  # else its threshold would mean little
    labels, topics = material.labels.take(fitting), Topics.fit(material.features["prompt"].counts[fitting], seed)
    routers: dict[Mode, RouterModel] = {
        mode: fit_router(rows.take(fitting), labels, topics, seed, members)
        for mode, rows in material.features.items()
        if mode != "opening" or has_gate_2
    }
    p_gain: dict[Mode, Floats] = {
        mode: router.probability(material.features[mode].take(calibrating)) for mode, router in routers.items()
    }
    return FittedGates(routers, fitting, calibrated(p_gain, material, calibrating))


def prompts_to_promise(quality: float, delta: float = DELTA) -> int:
    """The least number of graded prompts, in tens, that can promise a quality below 1 of a cloud that scores 0.9.

    With fewer every request escalates, however good the local model is.
    """
    rows = rows_to_promise(quality, _CLOUD_SCORE, delta)
    return max(MIN_LABELS, ceil(rows / HELD_OUT / 10) * 10)


def split_rows(labels: Labels, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The rows to fit on and those to calibrate on, which are representative ones; both rising.

    Rows that ask the same as a held-out one and are not representative are in neither.
    """
    _, first, inverse = np.unique(labels.same, return_index=True, return_inverse=True)
    same = first[inverse]  # the first row that asks it
    groups = np.unique(same[labels.representative_rows])
    held = np.random.default_rng(seed).permutation(groups)[: round(HELD_OUT * len(groups))]
    kept_out = np.isin(same, held)
    return np.flatnonzero(~kept_out), labels.representative_rows[kept_out[labels.representative_rows]]


def calibrated(p_gain: Mapping[Mode, Floats], material: Material, rows: NDArray[Any]) -> CalibrationRows:
    """The rows that thresholds come from, by the P(gain) that shipped gates, which never saw them, give them."""
    labels, (read, written, _) = material.labels.take(rows), material.tokens
    during = p_gain.get("opening")
    if during is not None and material.opened is not None:  # gate 2 sends up no answer that ends before it is asked
        during = np.where(material.opened[rows], during, 0.0)
    return CalibrationRows(
        before=p_gain["prompt"],
        after=p_gain.get("cascade"),
        during=during,
        local=labels.weak,
        cloud=labels.strong,
        read=read[rows],
        written=written[rows],
        prompts=labels.evidence,
    )
