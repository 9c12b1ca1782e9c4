"""Fits what a second sample does to P(gain), on calibration rows that gate 3 is undecided on.

A logistic regression in the agreement of both answers, from the log-odds of P(gain) on. These are calibrated, so that
no further curve is due: where a second answer says nothing, P(gain) stays about as it is. Each calibration row gets
its updated P(gain) by a model that did not see it, so that the thresholds that come of these rows are those of the
router as it runs with second samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .agreement import Said
from .metrics import Bools, Floats, auroc
from .optional import load_module, load_onnxruntime
from .second import INPUT, TEMPERATURE, SecondCard, agreement

__all__ = ["BAND", "FittedSecond", "Update", "agreements", "fit_second"]

# Where a second answer may turn the decision: below, nearly all stays, and above nearly all goes up, whatever it says.
BAND = (0.05, 0.5)
_FOLDS = 5
_LEAST_OF_CLASS = 20
_EDGE = 1e-3
_PENALTY = 3.0
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Update:
    """`sigmoid(log-odds + agreement @ weights + bias)`: P(gain) of rows of (P(gain), agreement, shared words), (n, 3)
    float32. Of two rows that agree alike it keeps the order.
    """

    weights: Floats
    bias: float

    @classmethod
    def fit(cls, rows: NDArray[Any], better: Bools) -> Update:
        """The likeliest one, by Newton's method, under a penalty on the weights that wants evidence for them."""
        odds, agreed = _parts(rows)
        x = np.column_stack((np.ones(len(rows)), agreed))
        penalty = np.diag([0.0] + [_PENALTY] * agreed.shape[1])
        weights = np.zeros(x.shape[1])
        for _ in range(50):
            p = _sigmoid(odds + x @ weights)
            curvature = (x * np.maximum(p * (1 - p), 1e-9)[:, None]).T @ x + penalty
            step = np.linalg.solve(curvature, x.T @ (better - p) - penalty @ weights)
            weights = weights + step
            if np.abs(step).max() < 1e-10:
                break
        return cls(weights[1:], float(weights[0]))

    def probability(self, rows: NDArray[Any]) -> Floats:
        """(n,) in [0, 1]."""
        odds, agreed = _parts(rows)
        return _sigmoid(odds + agreed @ self.weights + self.bias)


@dataclass(frozen=True, slots=True)
class FittedSecond:
    """What a policy gets: its card's part, its graph, and `again`, (n,): P(gain) of each calibration row with a second
    sample, by models that did not see it; that of gate 3 where nothing is undecided.
    """

    card: SecondCard
    graph: bytes
    again: Floats


def agreements(answers: Iterable[tuple[str, str | None]]) -> Floats:
    """(n, 2) of first and second answers; NaN where there is no second one."""
    nothing = (np.nan, np.nan)
    found = [nothing if second is None else agreement(Said(first), Said(second)) for first, second in answers]
    return np.array(found, np.float64).reshape(-1, 2)


def fit_second(
    p_gain: Floats, agreed: Floats, gain: Bools, same: NDArray[Any] | None = None, seed: int = 0
) -> FittedSecond | None:
    """Fit on rows of gate 3's cross-fitted `p_gain`, (n,), with the `agreements` of both answers, (n, 2).

    `same`: (n,) marks of rows that ask the same, which share a fold.

    None if the undecided rows are too few: 20 of them with a gain and 20 without. Raises ValueError if one of them has
    no second answer, and RuntimeError if the graph disagrees with its model.
    """
    low, high = BAND
    undecided = np.flatnonzero((p_gain >= low) & (p_gain <= high))
    rows = np.column_stack((p_gain, agreed))[undecided].astype(np.float32)
    better = gain[undecided]
    folds = _folds(undecided if same is None else same[undecided], seed)
    if not _enough(better, folds):
        return None
    if not np.isfinite(rows).all():
        raise ValueError("an undecided row has no second answer")
    again = p_gain.astype(np.float64)
    for fold in np.unique(folds):
        held = folds == fold
        again[undecided[held]] = Update.fit(rows[~held], better[~held]).probability(rows[held])
    update = Update.fit(rows, better)
    metrics = {
        "share": len(undecided) / len(p_gain),
        "agreeing": float(rows[:, 1].mean()),
        "auroc_undecided": auroc(p_gain[undecided], better),
        "auroc_undecided_again": auroc(again[undecided], better),
        "auroc": auroc(p_gain, gain),
        "auroc_again": auroc(again, gain),
    }
    card = SecondCard(low, high, TEMPERATURE, len(undecided), metrics=metrics)
    return FittedSecond(card, _exported(update, rows), again)


def _enough(better: Bools, folds: NDArray[Any]) -> bool:
    """Whether there is something to learn from, also without any one fold."""
    positive = int(better.sum())
    if min(positive, len(better) - positive) < _LEAST_OF_CLASS:
        return False
    return all(0 < better[folds != fold].mean() < 1 for fold in np.unique(folds))


def _folds(marks: NDArray[Any], seed: int) -> NDArray[np.int64]:
    """(n,) the fold of each row; those with the same mark share one."""
    same = np.unique(marks, return_inverse=True)[1]
    return (np.random.default_rng(seed).permutation(len(same)) % _FOLDS)[same]


def _parts(rows: NDArray[Any]) -> tuple[Floats, Floats]:
    """The log-odds of P(gain), (n,), and both measures of agreement, (n, 2)."""
    p = np.clip(rows[:, 0].astype(np.float64), _EDGE, 1.0 - _EDGE)
    return np.log(p / (1.0 - p)), rows[:, 1:].astype(np.float64)


def _sigmoid(x: Floats) -> Floats:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _exported(update: Update, rows: NDArray[Any]) -> bytes:
    """The graph, checked against the Python model on every row, each by itself, as in use."""
    graph = _to_onnx(update)
    session = load_onnxruntime().InferenceSession(graph, providers=["CPUExecutionProvider"])
    theirs = np.concatenate([session.run(None, {INPUT: row[None]})[0] for row in rows])
    gap = float(np.abs(theirs - update.probability(rows)).max())
    if gap > _TOLERANCE:
        raise RuntimeError(f"the exported update differs from its Python model by {gap:.1e}")
    return graph


def _to_onnx(update: Update) -> bytes:
    """`answers` (n, 3) float32 -> `p_gain` (n,) float32."""
    load_module("onnx", "train")
    from onnx import TensorProto, helper

    from .export import Graph

    graph = Graph()
    rows = graph.node("Cast", INPUT, to=TensorProto.DOUBLE)
    p = graph.node("Gather", rows, graph.constant("first", np.array([0], np.int64)), axis=1)
    agreed = graph.node("Gather", rows, graph.constant("others", np.array([1, 2], np.int64)), axis=1)
    clipped = graph.node("Clip", p, graph.constant("low", np.array(_EDGE)), graph.constant("high", np.array(1 - _EDGE)))
    against = graph.node("Sub", graph.constant("whole", np.array([[1.0]])), clipped)
    odds = graph.node("Log", graph.node("Div", clipped, against))
    product = graph.node("MatMul", agreed, graph.constant("weights", update.weights[:, None]))
    moved = graph.node("Add", product, graph.constant("bias", np.array([[update.bias]])))
    score = graph.node("Add", odds, moved)
    return graph.finish(
        graph.node("Sigmoid", score), [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["n", 3])]
    )
