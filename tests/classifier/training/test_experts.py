"""The experts behind the gates: what they may learn from, and what they may not."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="needs the [train] extra")

from updraft.classifier.evaluation.metrics import auroc
from updraft.classifier.features.vectors import FeatureLayout
from updraft.classifier.training.experts import ExpertSpec, FitOptions, TrainingRows, fit_expert

LAYOUT = FeatureLayout("gate3", 4)


def rows(rng: np.random.Generator, slopes: tuple[float, ...], rates: tuple[float, ...]) -> TrainingRows:
    """Kinds of 400 rows: the first signal rises with gain by `slopes`, from a level that falls with the kind's rate."""
    parts: list[TrainingRows] = []
    signal = LAYOUT.columns("signals")[0]
    for kind, (slope, rate) in enumerate(zip(slopes, rates, strict=True)):
        x = rng.normal(size=(400, LAYOUT.width)).astype(np.float32)
        gain = rng.uniform(size=400) < rate
        x[:, signal] += slope * gain - 3 * rate
        names = np.full(400, f"kind{kind}")
        parts.append(TrainingRows(x, gain, names, names))
    return TrainingRows(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "gain", "kinds", "families"))
    )


def test_a_within_kind_expert_learns_what_separates_inside_kinds_although_kinds_pull_the_other_way() -> None:
    """Across kinds the signal falls with gain, inside every kind it rises."""
    rng = np.random.default_rng(0)
    train = rows(rng, (1.0, 1.0, 1.0, 1.0), (0.2, 0.4, 0.6, 0.8))
    new_kind = rows(rng, (1.0,), (0.5,))
    found = {}
    for within_kind in (False, True):
        spec = ExpertSpec("x", "linear", ("signals",), within_kind=within_kind, strength=0.05)
        found[within_kind] = auroc(fit_expert(spec, LAYOUT, train, FitOptions()).score(new_kind.x), new_kind.gain)
    assert found[True] > 0.7
    assert found[True] > found[False] + 0.02


def test_a_within_kind_expert_scores_without_knowing_the_kind() -> None:
    rng = np.random.default_rng(1)
    train = rows(rng, (1.0, 1.0), (0.3, 0.7))
    spec = ExpertSpec("x", "linear", ("signals",), within_kind=True)
    expert = fit_expert(spec, LAYOUT, train, FitOptions())
    assert expert.score(train.x).shape == (800,)
    assert np.isfinite(expert.score(np.zeros((1, LAYOUT.width), np.float32))).all()
