"""`updraft bench router` from a file to figures, by cross-validation and with a test file."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner
from updraft.bench.router.measure import RouterBenchOptions, RouterMeasurements, measure, random_apgr, within_folds
from updraft.bench.router.plot import terminal_plot
from updraft.classifier.evaluation.cost_quality import CostQualityCurve
from updraft.cli.main import app
from updraft.protocol.errors import InvalidRequestError


def graded_file(path: Path, n: int, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("prompt", "domain", "weak", "strong"))
        for i in range(n):
            hard = rng.random() < 0.5
            prompt = f"{'Prove the theorem' if hard else 'Name the town'} number {seed}-{i} {rng.integers(1000)}"
            domain = "moral_scenarios" if i % 7 == 0 else "other"
            writer.writerow((prompt, domain, int(rng.random() < (0.2 if hard else 0.9)), int(rng.random() < 0.9)))
    return path


def test_with_a_test_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("updraft.bench.router.measure.DRAWS", 20)
    train, test = graded_file(tmp_path / "train.csv", 300, 0), graded_file(tmp_path / "test.csv", 250, 1)
    out = tmp_path / "out.json"
    call = ["bench", "router", "--data", train, "--test", test, "--labels", 200, "--seeds", 2, "--json", out]
    result = CliRunner().invoke(app, [str(part) for part in call])
    assert result.exit_code == 0, result.output
    assert "strong calls" in result.output
    metrics = json.loads(out.read_text())["metrics"]
    assert metrics["rows"] == 250
    assert metrics["apgr"] > 0.65
    assert metrics["apgr_low"] < metrics["apgr"] < metrics["apgr_high"] < metrics["oracle_apgr"] + 0.1
    assert metrics["random_apgr"] == pytest.approx(0.5, abs=0.1)
    assert 0 < metrics["cpt50"] < metrics["cpt80"] < 1
    assert metrics["export_gap"] < 1e-5
    assert metrics["unchanged.casing"] == metrics["unchanged.blanks"] == metrics["unchanged.widths"] == 1
    assert 0 <= metrics["paraphrase_flips.at_0.5"] <= 1
    strata = {name: value for name, value in metrics.items() if name.startswith("strata.")}
    assert 50 <= sum(value for name, value in strata.items() if name.endswith(".rows")) <= 250, strata
    names = {"apgr_std", "apgr_cleaned", "auroc", "ece", "decision_ms.p99", "ece_by_domain.other"}
    names |= {
        f"{name}{promise}_{alpha}"
        for name in ("violation_rate", "expected_risk", "risk", "exceedance", "share_over_hindsight")
        for promise in ("", "_mean")
        for alpha in ("0.02", "0.05", "0.1")
    }
    assert names <= metrics.keys()


def test_rows_of_the_test_file_are_not_trained_on(tmp_path: Path) -> None:
    train = graded_file(tmp_path / "train.csv", 300, 0)
    with pytest.raises(InvalidRequestError, match="no row is left to train on"):
        measure(RouterBenchOptions(train, test=train), print)


def test_more_labels_than_rows(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="there are only 240 training rows"):
        measure(RouterBenchOptions(graded_file(tmp_path / "train.csv", 300, 0), labels=250), print)


def drawn() -> RouterMeasurements:
    ends = np.array([0.0, 1.0])
    oracle = CostQualityCurve(np.array([0.0, 0.4, 1.0]), np.array([0.5, 0.9, 0.8]), 0.5, 0.8)
    return RouterMeasurements({}, CostQualityCurve(ends, np.array([0.5, 0.8]), 0.5, 0.8), oracle)


def test_the_curve_in_the_terminal() -> None:
    lines = terminal_plot(drawn().curve, drawn().oracle).splitlines()
    assert lines[0].startswith("  90.0%")
    assert "o" in lines[0]
    assert "*" in lines[-3]
    assert len({line.index("|") for line in lines[:-2]}) == 1


def test_a_coin_recovers_half() -> None:
    rng = np.random.default_rng(0)
    weak, strong = (rng.random(4000) < 0.3) * 1.0, (rng.random(4000) < 0.8) * 1.0
    assert random_apgr(weak, strong) == pytest.approx(0.5, abs=0.03)


def test_folds_are_ranked_apart() -> None:
    ranked = within_folds(np.array([0.9, 0.8, 0.1, 0.2]), np.array([0, 0, 1, 1]))
    assert ranked == pytest.approx([0.75, 0.25, 0.25, 0.75])
