"""A model of P(gain), learned from graded rows: the mean of two simple models, calibrated by cross-validation.

Both models predict the gain (the strong tier's score minus the weak tier's), because difficulty alone says little about
the gain (decision 002). Two models are averaged because their errors differ (decision 060). One is a ridge regression.
The other is a forest that predicts both tiers' scores at once, so that each split is chosen on twice the evidence. Both
read the features of the blocks and the topics, which are the main directions of the wording.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...protocol.errors import InvalidRequestError
from ..arrays import Array, Bools, Floats
from ..calibration.probability_curve import ProbabilityCurve, fit_curve
from ..features.blocks import BlockName
from ..features.feature_rows import FeatureRows
from ..features.wording import COUNTS
from ..optional_imports import load_module

# Minimum number of graded prompts for a policy, and minimum number of prompts to fit one router on.
MIN_LABELS, MIN_FITTED = 100, 40
_TOPICS = 50
_FOLDS = 5
# Half of the questions are held out, and each cross-validation fold needs at least one of the remaining questions.
MIN_DIFFERENT = 2 * _FOLDS
_CLIP = 4.0
_TREES, _LEAF, _LEAVES = 150, 12, 100
# Scale of a block's features in the ridge; a small scale strengthens the penalty. Topics have a scale of about 0.1.
_WEIGHTS: dict[BlockName, float] = {"wording": 0.03, "quantities": 0.03, "conversation": 0.03}
_WEIGHT_OF_OTHERS = 0.2
_PENALTY = 10.0

# Models whose standardised scores a router averages.
MEMBERS = ("ridge", "forest")


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of n rows. Models are fitted on all rows, weighted by `weight`, and calibrated on representative rows."""

    # (n,) score of the weak tier.
    weak: Floats
    # (n,) score of the strong tier.
    strong: Floats
    # (n,) identifier of the question, equal for rows with the same question.
    same: NDArray[Any]
    # (n,) inverse of the probability that a row was sampled; only ratios matter.
    weight: Floats
    # (n,) whether each row belongs to a random sample of the requests.
    representative: Bools

    @classmethod
    def of(cls, weak: Floats, strong: Floats, same: NDArray[Any] | None = None) -> Labels:
        """Create labels of equally sampled rows. `same`: None if no question repeats."""
        n = len(weak)
        return cls(weak, strong, np.arange(n) if same is None else same, np.ones(n), np.ones(n, np.bool_))

    @property
    def gain(self) -> Floats:
        return self.strong - self.weak

    @property
    def strong_wins(self) -> Bools:
        return self.strong > self.weak

    def take(self, rows: NDArray[Any]) -> Labels:
        return Labels(*(getattr(self, column.name)[rows] for column in fields(self)))

    @property
    def representative_rows(self) -> NDArray[Any]:
        """Indices of the representative rows, on which models are calibrated."""
        return np.flatnonzero(self.representative)

    @property
    def different(self) -> int:
        """Number of different questions among the representative rows."""
        return len(np.unique(self.same[self.representative]))

    @property
    def evidence(self) -> int:
        """Effective number of independent representative rows (Kish's formula), which repeated questions reduce."""
        repeats = np.unique(self.same[self.representative], return_counts=True)[1]
        return int(repeats.sum() ** 2 / float((repeats**2).sum()) + 1e-9) if len(repeats) else 0


@dataclass(frozen=True, slots=True)
class Topics:
    """Topics of the wording: a truncated SVD of weighted n-gram counts."""

    # (COUNTS,) weight of each n-gram bucket.
    weights: Floats
    # (COUNTS, 50) directions of largest variance among weighted prompts; rounded to float32, as exported.
    directions: Floats

    @classmethod
    def fit(cls, counts: Any, seed: int) -> Topics:
        document_frequency = np.asarray((counts > 0).sum(axis=0), np.float64).ravel()
        weights = np.log((1.0 + counts.shape[0]) / (1.0 + document_frequency)) + 1.0
        svd = load_module("sklearn.decomposition", "calibrate").TruncatedSVD(_TOPICS, random_state=seed)
        with np.errstate(invalid="ignore"):  # explained variance is 0/0 if all prompts have the same words
            directions = np.asarray(svd.fit(_weighted(counts, weights)).components_.T, np.float32)
        return cls(weights, directions.astype(np.float64))

    def prepare(self, rows: FeatureRows) -> Inputs:
        """Return the input matrix of `rows`: topics and features of the blocks side by side."""
        topics = np.asarray(_weighted(rows.counts, self.weights) @ self.directions, np.float64)
        weights = [np.full(width, _WEIGHTS.get(name, _WEIGHT_OF_OTHERS)) for name, width in rows.widths.items()]
        return Inputs(
            np.hstack((topics.astype(np.float32), rows.measures)), np.concatenate((np.ones(_TOPICS), *weights))
        )


@dataclass(frozen=True, slots=True)
class Inputs:
    """Input matrix of the member models."""

    # (n, k) topics and features of the blocks.
    x: Array
    # (k,) scale of each column in the ridge.
    weights: Floats

    def take(self, rows: NDArray[Any]) -> Inputs:
        return Inputs(self.x[rows], self.weights)


@dataclass(frozen=True, slots=True)
class Ridge:
    """A linear model, `clip((x - mean) / scale) @ weights + bias`; the clip bounds the effect of one odd value."""

    mean: Floats
    scale: Floats
    weights: Floats
    bias: float
    clip: float = _CLIP

    def score(self, x: Array) -> Floats:
        return _standardised(x, self.mean, self.scale, self.clip) @ self.weights + self.bias


@dataclass(frozen=True, slots=True)
class Forest:
    """Extremely randomised trees (Geurts et al., 2006) that predict the weak and the strong score."""

    model: Any

    def score(self, x: Array) -> Floats:
        both = np.asarray(self.model.predict(x), np.float64)
        return both[:, 1] - both[:, 0]


Member = Ridge | Forest


@dataclass(frozen=True, slots=True)
class RouterModel:
    """P(gain) of prompts: `curve(bias + sum(weight * member.score))`."""

    topics: Topics
    members: Mapping[str, Member]
    weights: Mapping[str, float]
    bias: float
    curve: ProbabilityCurve

    def score(self, rows: FeatureRows) -> Floats:
        return self.blended(self.topics.prepare(rows).x)

    def blended(self, x: Array) -> Floats:
        """Return the uncalibrated score of the rows of `x`, a matrix from `topics.prepare`."""
        return self.bias + _sum(weight * self.members[name].score(x) for name, weight in self.weights.items())

    def refitted(self, rows: FeatureRows, labels: Labels, seed: int = 0) -> RouterModel:
        """Return a router with the same topics and weights, whose members are fitted on other rows."""
        inputs = self.topics.prepare(rows)
        return replace(self, members={name: _fit(name, inputs, labels, seed) for name in self.members})

    def probability(self, rows: FeatureRows) -> Floats:
        """Return P(gain), (n,) float64 in [0, 1]."""
        return np.clip(self.curve(self.score(rows)), 0.0, 1.0)


def fit_router(
    rows: FeatureRows, labels: Labels, topics: Topics | None = None, seed: int = 0, members: Sequence[str] = MEMBERS
) -> RouterModel:
    """Fit a router on labelled `rows`; deterministic for a seed. Rows with equal `labels.same` share a fold.

    `topics`: None fits new topics on these rows.

    Raises InvalidRequestError for too few labels, or if every row or no row is a gain.
    """
    compared = labels.representative_rows
    n, strong_wins = len(compared), labels.strong_wins[compared]
    if n < MIN_FITTED or strong_wins.all() or not strong_wins.any():
        raise InvalidRequestError(
            f"A router needs at least {MIN_FITTED} graded prompts to fit on, some answered better by the strong "
            f"tier and some not: there are {n}, {int(strong_wins.sum())} of them answered better by the strong tier."
        )
    topics = topics or Topics.fit(rows.counts, seed)
    x = topics.prepare(rows)
    crossed = _cross_fitted(x, labels, seed, members)
    weights = {name: 1.0 / (len(members) * max(float(scores.std()), 1e-9)) for name, scores in crossed.items()}
    bias = -sum(weight * float(crossed[name].mean()) for name, weight in weights.items())
    score = bias + _sum(weight * crossed[name] for name, weight in weights.items())
    fitted = {name: _fit(name, x, labels, seed) for name in members}
    return RouterModel(topics, fitted, weights, bias, fit_curve(score[compared], strong_wins))


def _sum(terms: Iterable[Floats]) -> Floats:
    return np.sum(np.stack(list(terms)), axis=0)


def _cross_fitted(inputs: Inputs, labels: Labels, seed: int, names: Sequence[str]) -> dict[str, Floats]:
    """Return the scores of each row by models that were fitted on the folds without this row."""
    folds = _folds(labels, seed)
    crossed = {name: np.zeros(len(folds)) for name in names}
    for fold in range(_FOLDS):
        held, training = folds == fold, folds != fold
        for name, scores in crossed.items():
            scores[held] = _fit(name, inputs.take(training), labels.take(training), seed).score(inputs.x[held])
    return crossed


def _folds(labels: Labels, seed: int) -> NDArray[Any]:
    """Assign rows to folds, (n,); rows with the same question share a fold."""
    same = np.unique(labels.same, return_inverse=True)[1]
    return (np.random.default_rng(seed).permutation(same.max() + 1) % _FOLDS)[same]


def _fit(name: str, inputs: Inputs, labels: Labels, seed: int) -> Member:
    if name == "ridge":
        return _fit_ridge(inputs, labels.gain, labels.weight)
    ensemble = load_module("sklearn.ensemble", "calibrate")
    # With many rows, small leaves would fit single words, so that typos change more decisions and calibration is worse.
    leaf = max(_LEAF, len(inputs.x) // _LEAVES)
    trees = ensemble.ExtraTreesRegressor(_TREES, min_samples_leaf=leaf, max_features=0.3, random_state=seed)
    return Forest(trees.fit(inputs.x, np.stack((labels.weak, labels.strong), axis=1), sample_weight=labels.weight))


def _fit_ridge(inputs: Inputs, gain: Floats, rows: Floats) -> Ridge:
    """Fit a ridge. `rows`: (n,) weight of each row; only ratios matter."""
    x, weight, share = inputs.x, inputs.weights, rows / rows.mean()
    mean: Floats = x.mean(axis=0, dtype=np.float64)
    scale: Floats = np.asarray(np.maximum(x.std(axis=0, dtype=np.float64), 1e-3), np.float64)
    # Topics keep their scale. If each were divided by its spread, the weakest topic would count as much as the first.
    scale[:_TOPICS] = 1.0
    linear = load_module("sklearn.linear_model", "calibrate").Ridge(_PENALTY, solver="cholesky")
    linear.fit(_standardised(x, mean, scale) * weight, gain, sample_weight=share)
    return Ridge(mean, scale, np.asarray(linear.coef_ * weight, np.float64), float(linear.intercept_))


def _standardised(x: Array, mean: Floats, scale: Floats, clip: float = _CLIP) -> Floats:
    return np.asarray(np.clip((x.astype(np.float64) - mean) / scale, -clip, clip), np.float64)


def _weighted(counts: Any, weights: Floats) -> Any:
    """Weight the counts, and scale the words and the characters of each row to a length of 1/sqrt(2) (0 if empty)."""
    sparse = load_module("scipy.sparse", "calibrate")
    halves: list[Any] = []
    for half in (slice(0, COUNTS // 2), slice(COUNTS // 2, COUNTS)):
        part = counts[:, half].astype(np.float64).multiply(weights[half]).tocsr()
        length = np.sqrt(2.0 * np.asarray(part.multiply(part).sum(axis=1)).ravel())
        halves.append(sparse.diags(1.0 / np.where(length > 0, length, 1.0)) @ part)
    return sparse.hstack(halves).tocsr()
