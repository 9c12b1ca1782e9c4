"""The models behind the gates: a few small experts per gate, blended, then calibrated. scikit-learn at training only.

A classifier that merely recognises the kind of a question is worthless on the next kind. Two things prevent it here:
- A `within_kind` expert is a logistic regression with fixed effects: while it is fitted every kind has an intercept of
  its own, so that recognising the kind earns nothing; only what separates right from wrong *inside* kinds does.
- The blend of experts is chosen on rows of kinds the experts have not seen, together with ordinary cross-validation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array, Bools, Floats
from ..calibration.probability_curve import ProbabilityCurve, cross_calibrated, fit_curve
from ..evaluation.metrics import auroc
from ..features.vectors import Block, FeatureLayout, Gate
from ..optional import load_module

_FOLDS = 5
_BLEND_STEPS = 4
_BLEND_TOLERANCE = 0.002
_MIN_CLASS_ROWS = 10
_CLIP = 4.0
_EFFECT = 5.0


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """How one expert is fitted. `strength`: inverse L2 penalty of a linear expert; `within_kind` is for those only."""

    name: str
    form: Literal["trees", "linear"]
    blocks: tuple[Block, ...]
    within_kind: bool = False
    strength: float = 0.01


_MEASURES: tuple[Block, ...] = ("structure", "prompt_signals", "signals", "answer")
_SIGNALS: tuple[Block, ...] = ("prompt_signals", "signals", "answer")
_ALL: tuple[Block, ...] = (*_MEASURES, "ngrams", "prompt_hidden", "answer_hidden")
# So little that no single word decides: with 0.01 one typo turns a tenth of gate 1's decisions.
_WORDING = 1e-4
_RUN_EXPERTS = (
    ExpertSpec("signals-within-kind", "linear", _SIGNALS, within_kind=True, strength=0.05),
    ExpertSpec("measure-trees", "trees", _MEASURES),
    ExpertSpec("probe-linear", "linear", _ALL),
)
EXPERTS: dict[Gate, tuple[ExpertSpec, ...]] = {
    "gate1": (
        ExpertSpec("structure-trees", "trees", ("structure",)),
        ExpertSpec("wording-linear", "linear", ("structure", "ngrams"), strength=_WORDING),
        ExpertSpec("wording-within-kind", "linear", ("structure", "ngrams"), within_kind=True, strength=_WORDING),
    ),
    "gate2": _RUN_EXPERTS,
    "gate3": _RUN_EXPERTS,
}


@dataclass(frozen=True, slots=True)
class FitOptions:
    """The same seed gives the same models; `trees` is the size of each tree expert."""

    seed: int = 0
    trees: int = 150


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """Training rows of one gate: `x` (n, width) float32, `gain` (n,) bool; `kinds` and `families` only group them."""

    x: Array
    gain: Bools
    kinds: NDArray[np.str_]
    families: NDArray[np.str_]

    def take(self, rows: NDArray[Any]) -> TrainingRows:
        return TrainingRows(self.x[rows], self.gain[rows], self.kinds[rows], self.families[rows])


class Expert(Protocol):
    def score(self, x: Array) -> Floats:
        """(n,) log-odds of gain for (n, width) features."""
        ...


@dataclass(frozen=True, slots=True)
class TreeExpert:
    """Gradient-boosted trees over the named columns."""

    columns: list[int]
    model: Any

    def score(self, x: Array) -> Floats:
        return np.asarray(self.model.decision_function(x[:, self.columns]), np.float64)


@dataclass(frozen=True, slots=True)
class LinearExpert:
    """`clip((x - mean) / scale) @ weights + bias` over the named columns; the clip bounds what one odd value can do."""

    columns: list[int]
    mean: Floats
    scale: Floats
    weights: Floats
    bias: float
    clip: float = _CLIP

    def score(self, x: Array) -> Floats:
        return self.standardised(x) @ self.weights + self.bias

    def standardised(self, x: Array) -> Floats:
        return np.clip((x[:, self.columns].astype(np.float64) - self.mean) / self.scale, -self.clip, self.clip)


@dataclass(frozen=True, slots=True)
class GateModel:
    """One gate's P(gain): `curve(sum(weight * expert.score(x)))`. Experts of weight zero are not kept."""

    layout: FeatureLayout
    specs: tuple[ExpertSpec, ...]
    experts: tuple[Expert, ...]
    weights: tuple[float, ...]
    curve: ProbabilityCurve

    def score(self, x: Array) -> Floats:
        return _blend(np.stack([expert.score(x) for expert in self.experts], axis=1), np.array(self.weights))

    def probability(self, x: Array) -> Floats:
        """(n,) float64 in [0, 1]."""
        return np.clip(self.curve(self.score(x)), 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class FittedGate:
    """A gate fitted on all rows, and what cross-fitting said about it.

    `probability`: (n,) P(gain) of each training row by models and calibration that did not see it. `seen` and `unseen`:
    (n, experts) scores of each row by experts that did not see it, and by some that saw nothing of its kind.
    """

    model: GateModel
    probability: Floats
    auroc: float
    auroc_unseen_kinds: float
    seen: Floats
    unseen: Floats

    def refit_score(self, rows: TrainingRows, kept: Bools, x: Array, options: FitOptions) -> Floats:
        """Scores of `x` by experts fitted on the `kept` training rows only, blended as suits these rows best.

        That choice rests on cross-fitted scores of the kept rows, some of whose experts saw the others.
        """
        train, layout = rows.take(kept), self.model.layout
        weights = _blend_weights(self.seen[kept], self.unseen[kept], train)
        scores = [fit_expert(spec, layout, train, options).score(x) for spec in EXPERTS[layout.gate]]
        return _blend(np.stack(scores, axis=1), weights)


def fit_gate(layout: FeatureLayout, rows: TrainingRows, options: FitOptions) -> FittedGate:
    """Fit one gate. Raises ValueError if the rows hold fewer than ten of either class."""
    positive = int(rows.gain.sum())
    if min(positive, len(rows.gain) - positive) < _MIN_CLASS_ROWS:
        raise ValueError(
            f"a gate needs {_MIN_CLASS_ROWS} rows with and without gain, got {positive} of {len(rows.gain)}"
        )
    specs = EXPERTS[layout.gate]
    seen = cross_fit(specs, layout, rows, _random_folds(rows.gain, options.seed), options)
    unseen = cross_fit(specs, layout, rows, _kind_folds(rows.kinds, options.seed), options)
    weights = _blend_weights(seen, unseen, rows)
    used = [i for i, weight in enumerate(weights) if weight > 0]
    score = _blend(seen, weights)
    model = GateModel(
        layout,
        tuple(specs[i] for i in used),
        tuple(fit_expert(specs[i], layout, rows, options) for i in used),
        tuple(float(weights[i]) for i in used),
        fit_curve(score, rows.gain),
    )
    return FittedGate(
        model,
        cross_calibrated(score, rows.gain, _random_folds(rows.gain, options.seed + 1)),
        auroc(score, rows.gain),
        _median_auroc(_blend(unseen, weights), rows),
        seen,
        unseen,
    )


def _blend_weights(seen: Floats, unseen: Floats, rows: TrainingRows) -> Floats:
    """Weights of the experts' raw scores. Experts differ in how loud they are; unit spread makes them comparable."""
    spread = np.maximum(seen.std(axis=0), 1e-6)
    return _choose_blend(seen / spread, unseen / spread, rows) / spread


def fit_expert(spec: ExpertSpec, layout: FeatureLayout, rows: TrainingRows, options: FitOptions) -> Expert:
    if spec.form == "trees":
        return _fit_trees(layout.columns(*spec.blocks), rows, options)
    return _fit_linear(spec, layout, rows)


def _fit_trees(columns: list[int], rows: TrainingRows, options: FitOptions) -> TreeExpert:
    model = load_module("sklearn.ensemble", "train").GradientBoostingClassifier(
        n_estimators=options.trees,
        learning_rate=0.07,
        max_depth=4,
        min_samples_leaf=20,
        subsample=0.6,
        max_features="sqrt",
        random_state=options.seed,
    )
    return TreeExpert(columns, model.fit(rows.x[:, columns], rows.gain))


def _fit_linear(spec: ExpertSpec, layout: FeatureLayout, rows: TrainingRows) -> LinearExpert:
    columns = layout.columns(*spec.blocks)
    x = rows.x[:, columns].astype(np.float64)
    mean, scale = x.mean(axis=0), _scales(x, spec, layout)
    standard = np.clip((x - mean) / scale, -_CLIP, _CLIP)
    effects = _kind_effects(rows.kinds) if spec.within_kind else np.empty((len(x), 0))
    model = load_module("sklearn.linear_model", "train").LogisticRegression(C=spec.strength, max_iter=300, tol=1e-3)
    model.fit(np.hstack((standard, effects)), rows.gain)
    weights = np.asarray(model.coef_[0], np.float64)
    # An unseen kind is taken for an average one.
    bias = float(model.intercept_[0]) + float((effects @ weights[len(columns) :]).mean())
    return LinearExpert(columns, mean, scale, weights[: len(columns)], bias)


def _kind_effects(kinds: NDArray[np.str_]) -> Floats:
    """(n, number of kinds) one column per kind, large so that the penalty hardly holds its intercept back."""
    names, inverse = np.unique(kinds, return_inverse=True)
    return _EFFECT * np.eye(len(names))[inverse]


def _scales(x: Floats, spec: ExpertSpec, layout: FeatureLayout) -> Floats:
    """The spread of each column; hashed and hidden blocks share one, as dividing by their own blows rare columns up."""
    scale = np.maximum(x.std(axis=0), 1e-3)
    start = 0
    for block in spec.blocks:
        part = slice(start, start + (layout.width_of(block) if block in layout.blocks else 0))
        if block in ("ngrams", "prompt_hidden", "answer_hidden") and part.stop > part.start:
            scale[part] = float(np.sqrt((scale[part] ** 2).mean()))
        start = part.stop
    return scale


def cross_fit(
    specs: Sequence[ExpertSpec],
    layout: FeatureLayout,
    rows: TrainingRows,
    folds: NDArray[np.int64],
    options: FitOptions,
) -> Floats:
    """(n, len(specs)) scores of each row by experts fitted without the row's fold."""
    scores = np.zeros((len(rows.gain), len(specs)))
    for fold in np.unique(folds):
        held = folds == fold
        train, x = rows.take(~held), rows.x[held]
        for column, spec in enumerate(specs):
            scores[held, column] = fit_expert(spec, layout, train, options).score(x)
    return scores


def _choose_blend(seen: Floats, unseen: Floats, rows: TrainingRows) -> Floats:
    """The convex weights (in quarters) best on seen and unseen kinds; the fewest experts within a small tolerance."""
    grid = [
        np.array(parts) / _BLEND_STEPS
        for parts in itertools.product(range(_BLEND_STEPS + 1), repeat=seen.shape[1])
        if sum(parts) == _BLEND_STEPS
    ]
    worth = [auroc(_blend(seen, weights), rows.gain) + _median_auroc(_blend(unseen, weights), rows) for weights in grid]
    enough = max(worth) - 2 * _BLEND_TOLERANCE
    candidates = [
        (int((w > 0).sum()), -value, i) for i, (w, value) in enumerate(zip(grid, worth, strict=True)) if value >= enough
    ]
    return grid[min(candidates)[2]]


def _median_auroc(scores: Floats, rows: TrainingRows) -> float:
    """The median over kinds of the AUROC inside the kind; the plain AUROC if no kind has enough rows of each class."""
    values: list[float] = []
    for kind in np.unique(rows.kinds):
        inside = rows.kinds == kind
        positive = int(rows.gain[inside].sum())
        if min(positive, int(inside.sum()) - positive) >= _MIN_CLASS_ROWS:
            values.append(auroc(scores[inside], rows.gain[inside]))
    return float(np.median(values)) if values else auroc(scores, rows.gain)


def _random_folds(gain: Bools, seed: int) -> NDArray[np.int64]:
    """Fold numbers that share both classes evenly."""
    rng = np.random.default_rng(seed)
    folds = np.zeros(len(gain), np.int64)
    for value in (False, True):
        rows = rng.permutation(np.flatnonzero(gain == value))
        folds[rows] = np.arange(len(rows)) % _FOLDS
    return folds


def _kind_folds(kinds: NDArray[np.str_], seed: int) -> NDArray[np.int64]:
    """Fold numbers that keep each kind in one fold; random folds if there is only one kind."""
    names, inverse = np.unique(kinds, return_inverse=True)
    if len(names) == 1:
        return np.random.default_rng(seed).permutation(len(kinds)) % _FOLDS
    return (np.random.default_rng(seed).permutation(len(names)) % _FOLDS)[inverse]


def _blend(scores: Floats, weights: Floats) -> Floats:
    return scores @ weights
