"""Routers learned from graded text: they learn what is there, are honest about it, and export to the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from updraft.classifier.evaluation.cost_quality import cost_quality
from updraft.classifier.evaluation.metrics import auroc
from updraft.classifier.features.blocks import Mode, view_of
from updraft.classifier.features.feature_rows import featurise
from updraft.classifier.graded_row import AnswerSignals, GradedRow, gains, scores
from updraft.classifier.grading.graded_data import read_graded
from updraft.classifier.policy.exported_gates import ExportedGates, Graphs
from updraft.classifier.training.export import gate_to_onnx, topics_to_onnx
from updraft.classifier.training.router_model import Labels, RouterModel, fit_router
from updraft.protocol.errors import InvalidRequestError

GSM8K = Path(__file__).resolve().parents[4] / "shared" / "data" / "routing" / "routellm_gsm8k.csv.gz"
WORDS = ["apple", "river", "stone", "circle", "market", "window", "garden", "silver", "paper", "bridge", "candle"]


def population(n: int, seed: int, *, signals: bool = False) -> list[GradedRow]:
    """Proofs are hard for the weak model, and so is a sum that it gets wrong in its own steps."""
    rng = np.random.default_rng(seed)
    rows: list[GradedRow] = []
    for _ in range(n):
        hard = rng.random() < 0.4
        weak = float(rng.random() < (0.25 if hard else 0.9))
        a, b = (int(x) for x in rng.integers(2, 90, 2))
        task = "Prove rigorously that" if hard else "Please add up"
        prompt = f"{task} {a} and {b} {' '.join(rng.choice(WORDS, 6))}?"
        answer = f"{a} + {b} = {a + b + (0 if weak or rng.random() < 0.3 else 3)}"
        told = None
        if signals:
            logprobs = -rng.exponential(0.1 if weak else 0.6, 8).astype(np.float32)
            told = AnswerSignals(logprobs, -logprobs, np.ones(8, np.float32))
        rows.append(GradedRow(prompt, weak, float(rng.random() < 0.92), "", answer, told))
    return rows


def fitted(rows: list[GradedRow], mode: Mode) -> RouterModel:
    return fit_router(featurise(rows, mode), Labels.of(*scores(rows)))


@pytest.fixture(scope="module")
def train() -> list[GradedRow]:
    return population(400, 0)


@pytest.fixture(scope="module")
def test() -> list[GradedRow]:
    return population(400, 1)


@pytest.mark.parametrize(("mode", "least"), [("prompt", 0.72), ("cascade", 0.85)])
def test_learns_and_exports(train: list[GradedRow], test: list[GradedRow], mode: Mode, least: float) -> None:
    router = fitted(train, mode)
    features = featurise(test, mode)
    p_gain = router.probability(features)
    assert auroc(p_gain, gains(test)) > least
    assert abs(p_gain.mean() - gains(test).mean()) < 0.06
    graphs = topics_to_onnx(router.topics), gate_to_onnx(router, features.measures.shape[1])
    topics, gate = (onnxruntime.InferenceSession(graph) for graph in graphs)
    gates = ExportedGates(Graphs(topics, {mode: gate}), {mode: features.widths})
    views = [view_of(row) for row in test]
    exported = [gates.after(view) if mode == "cascade" else gates.before(view.prompt) for view in views]
    assert np.abs(exported - p_gain).max() < 1e-5


def test_a_seed_gives_the_same_router(train: list[GradedRow], test: list[GradedRow]) -> None:
    features = featurise(test, "prompt")
    assert (fitted(train, "prompt").probability(features) == fitted(train, "prompt").probability(features)).all()


def test_token_signals_are_read(train: list[GradedRow]) -> None:
    rows = population(300, 2, signals=True)
    router = fitted(rows, "cascade")
    later = population(300, 3, signals=True)
    assert auroc(router.probability(featurise(later, "cascade")), gains(later)) > 0.9
    with pytest.raises(InvalidRequestError, match="the data for the block signals"):
        featurise([*rows, *train], "cascade")


def test_unlearnable_data_is_refused(train: list[GradedRow]) -> None:
    with pytest.raises(InvalidRequestError, match="at least 40 graded prompts"):
        fitted(train[:30], "prompt")
    with pytest.raises(InvalidRequestError, match="there are 150, 0 of them answered better"):
        fitted([GradedRow(row.prompt, 1.0, 1.0) for row in train[:150]], "prompt")
    with pytest.raises(InvalidRequestError, match="weak_response"):
        featurise([GradedRow("p", 0.0, 1.0)], "cascade")


@pytest.mark.skipif(not GSM8K.exists(), reason=f"{GSM8K} is not there")
def test_gsm8k_cascade_on_a_fifth_of_it() -> None:
    rows = read_graded(GSM8K)
    kept = np.random.default_rng(0).permutation(len(rows)) % 5 > 0
    train = [row for row, k in zip(rows, kept, strict=True) if k]
    test = [row for row, k in zip(rows, kept, strict=True) if not k]
    p_gain = fitted(train, "cascade").probability(featurise(test, "cascade"))
    assert cost_quality(p_gain, *scores(test)).apgr > 0.75
