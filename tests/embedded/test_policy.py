"""The packaged policy keeps its promises on held-out tasks: its report is what the training command measured."""

from __future__ import annotations

import json
from typing import Any

import pytest
from updraft.classifier.features import PromptView
from updraft.embedded import pocket

pytest.importorskip("onnxruntime", reason="needs the [edge] extra")

from updraft.classifier.policy import Policy


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return json.loads((pocket.policy_folder() / "report.json").read_text())


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy.load(pocket.policy_folder())


def test_it_was_made_for_the_packaged_pair(policy: Policy) -> None:
    assert policy.models == {"local": pocket.SMALL, "cloud": pocket.LARGE}


def test_it_answers_with_probabilities(policy: Policy) -> None:
    for text in ("What is 2 + 2?", "", "🌀" * 50, "Put these in order: 3, 1, 2."):
        assert 0 <= policy.before(PromptView(text)) <= 1


def test_gate_3_finds_wrong_answers_better_than_any_single_token_signal(report: dict[str, Any]) -> None:
    signals = [value for value in report["single_signals"].values() if value is not None]
    assert report["gates"]["gate3"]["auroc_wrong"] > max(signals)


def test_gate_3_finds_wrong_answers(report: dict[str, Any]) -> None:
    assert report["gates"]["gate3"]["auroc_wrong"] >= 0.88


def test_p_gain_is_calibrated(report: dict[str, Any]) -> None:
    assert report["gates"]["gate3"]["ece"] <= 0.05


@pytest.mark.parametrize("by", ["kind", "family"])
def test_it_is_no_lookup_of_what_it_trained_on(report: dict[str, Any], by: str) -> None:
    left = next(entry for entry in report["leave_out"] if entry["by"] == by)
    assert left["median"] >= 0.80
    assert left["median"] > left["median_token_confidence"]


def at_default_target(report: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in report["routed"] if row["target"] == 0.98)


def test_the_cloud_share_is_modest(report: dict[str, Any]) -> None:
    assert at_default_target(report)["simulation"]["cloud_share"] <= report["wrong_rate"] + 0.15


def test_the_default_target_is_met(report: dict[str, Any]) -> None:
    assert at_default_target(report)["quality"] >= 0.98
