"""Fitting of a policy's gates, and the calibration rows on which every promise is based. Used by
`updraft calibrate`, `updraft learn` and `updraft bench guarantee`.

Gates learn the wording of the rows that they are fitted on, so thresholds computed from these rows would promise too
much (decision 059). Half of the representative rows, with all rows that repeat their questions, are therefore held out.
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
from ..licences.betting import rows_to_license
from .router_model import MEMBERS, MIN_DIFFERENT, MIN_FITTED, MIN_LABELS, Labels, RouterModel, Topics, fit_router

# Share of the representative rows held out, chosen on simulated populations (`updraft bench guarantee`).
HELD_OUT = 0.5
_OFTEN_OPENED = 0.1
# Mean score of the cloud that is assumed before any answer is graded.
_CLOUD_SCORE = 0.9


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Graded rows as numeric training data for the gates."""

    # Features for each gate.
    features: Mapping[Mode, FeatureRows]
    labels: Labels
    # Tokens that the cloud reads and writes, (n,) each, and whether any count is an estimate.
    tokens: tuple[Floats, Floats, bool]
    # (n,) whether each answer is longer than the opening that gate 2 reads. None, or few True: no gate 2 is fitted.
    opened: Bools | None = None


@dataclass(frozen=True, slots=True)
class FittedGates:
    """The shipped gates, and the rows for their thresholds."""

    routers: dict[Mode, RouterModel]
    # Indices of the rows that the gates were fitted on.
    fitting: NDArray[Any]
    # The held-out rows with the gates' P(gain).
    calibration: CalibrationRows


def fit_gates(material: TrainingData, seed: int = 0, members: Sequence[str] = MEMBERS) -> FittedGates:
    """Fit the gates on one part of the rows and judge the held-out part with them. The gates share their topics.

    Raises the errors of `fit_router`, and InvalidRequestError for fewer than 100 representative or 10 different rows.
    """
    if len(material.labels.representative_rows) < MIN_LABELS:
        raise InvalidRequestError(
            f"A policy needs at least {MIN_LABELS} graded prompts, not {len(material.labels.representative_rows)}."
        )
    if (different := material.labels.different) < MIN_DIFFERENT:
        raise InvalidRequestError(
            f"A policy needs at least {MIN_DIFFERENT} different prompts, but these ask only {different} different "
            "questions: add more."
        )
    fitting, calibrating = split_rows(material.labels, seed)
    opened = 0 if material.opened is None else int(material.opened[fitting].sum())
    has_gate_2 = opened >= max(MIN_FITTED, _OFTEN_OPENED * len(fitting))  # few long answers give a noisy threshold
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


def prompts_to_promise(quality: float, delta: float = DELTA, *, errs: bool = False) -> int:
    """Return the minimum number of graded prompts, rounded up to tens, that can promise `quality` (below 1).

    With fewer prompts every request escalates, even with a perfect local model. `errs`: for a cloud that is right in 9
    of 10 rows, whose promise `net` needs more rows.
    """
    perfect = np.repeat((1.0 - quality, 0.0), (9, 1))
    rows = rows_to_license(perfect, delta, quality) if errs else rows_to_promise(quality, _CLOUD_SCORE, delta)
    assert rows is not None, "perfect rows prove any quality below 1"
    return max(MIN_LABELS, ceil(rows / HELD_OUT / 10) * 10)


def split_rows(labels: Labels, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the indices of the rows to fit on and of the representative rows to calibrate on, both ascending.

    Rows that repeat a held-out question but are not representative are in neither part.
    """
    _, first, inverse = np.unique(labels.same, return_index=True, return_inverse=True)
    same = first[inverse]  # first row with the same question
    groups = np.unique(same[labels.representative_rows])
    held = np.random.default_rng(seed).permutation(groups)[: round(HELD_OUT * len(groups))]
    kept_out = np.isin(same, held)
    return np.flatnonzero(~kept_out), labels.representative_rows[kept_out[labels.representative_rows]]


def calibrated(p_gain: Mapping[Mode, Floats], material: TrainingData, rows: NDArray[Any]) -> CalibrationRows:
    """Combine held-out rows with their P(gain) from the shipped gates, which never saw these rows."""
    labels, (read, written, _) = material.labels.take(rows), material.tokens
    during = p_gain.get("opening")
    if during is not None and material.opened is not None:  # answers no longer than the opening skip gate 2
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
