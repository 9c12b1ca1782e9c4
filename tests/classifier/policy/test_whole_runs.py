"""A policy trained on all signals of Updraft's engines, hidden states included: from rows to decisions."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, get_args

import numpy as np
import pytest
from updraft.classifier.calibration.rows import CalibrationRows
from updraft.classifier.calibration.threshold_path import escalated
from updraft.classifier.evaluation.metrics import ece
from updraft.classifier.evaluation.single_signals import SINGLE_SIGNALS
from updraft.classifier.features.blocks import BLOCKS, GATE_BLOCKS, BlockName, Mode, view_of
from updraft.classifier.features.feature_rows import featurise
from updraft.classifier.graded_row import GradedRow, gains
from updraft.classifier.policy.exported_gates import Graphs
from updraft.classifier.policy.graph_files import open_graph, sha256
from updraft.classifier.policy.policy import GATE_FILES, TOPICS_FILE, Policy
from updraft.classifier.target import Target
from updraft.classifier.training.train import write_policy
from updraft.embedded.held_out import evaluate, leave_out, policy_probabilities
from updraft.protocol.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Trained

MODES: tuple[Mode, ...] = get_args(Mode)


@pytest.fixture(scope="module")
def policy(trained: Trained) -> Policy:
    return Policy.load(trained.folder)


@pytest.fixture(scope="module")
def judged(policy: Policy, held_out: list[GradedRow]) -> CalibrationRows:
    return policy_probabilities(policy, held_out)


def test_every_gate_declares_the_blocks_that_its_rows_have(policy: Policy) -> None:
    single = {mode: tuple(name for name in names if name != "conversation") for mode, names in GATE_BLOCKS.items()}
    assert {mode: (*blocks,) for mode, blocks in policy.card.blocks.items()} == single
    assert policy.card.missing == ["conversation"]
    assert set(get_args(BlockName)) == set(BLOCKS) == {name for names in GATE_BLOCKS.values() for name in names}


def test_the_loaded_policy_gives_the_python_probabilities(
    trained: Trained, policy: Policy, held_out: list[GradedRow]
) -> None:
    views = [view_of(row) for row in held_out]
    exported = {
        "prompt": [policy.before(view.prompt) for view in views],
        "opening": [policy.during(view) for view in views],
        "cascade": [policy.after(view) for view in views],
    }
    for mode, router in trained.fitted.routers.items():
        assert np.abs(exported[mode] - router.probability(featurise(held_out, mode))).max() <= 1e-5, mode


def test_graphs_agree_with_python_far_outside_the_training_range_too(trained: Trained, policy: Policy) -> None:
    names = {name.partition("-")[0]: trained.folder / name for name in policy.card.files}
    sessions = {
        name: open_graph(names[name.partition(".")[0]], sha256(names[name.partition(".")[0]].read_bytes()))
        for name in (TOPICS_FILE, *GATE_FILES.values())
    }
    graphs = Graphs(sessions[TOPICS_FILE], {mode: sessions[name] for mode, name in GATE_FILES.items()})
    rng = np.random.default_rng(0)
    for mode, router in trained.fitted.routers.items():
        width = sum(policy.card.blocks[mode].values())
        wild = (rng.normal(size=(100, 50 + width)) * 1e3).astype(np.float32)
        expected = np.clip(router.curve(router.blended(wild)), 0.0, 1.0)
        given = np.array([graphs.decide(mode, row[None, :50], row[50:]) for row in wild])
        assert np.abs(given - expected).max() <= 1e-5, mode
        assert ((given >= 0) & (given <= 1)).all()


def test_the_gates_beat_token_confidence_on_known_and_on_unseen_kinds(
    trained: Trained,
    policy: Policy,
    calibration: list[GradedRow],
    held_out: list[GradedRow],
    judged: CalibrationRows,
) -> None:
    left_out = [leave_out(trained.fitted, trained.material, calibration, held_out, by) for by in ("kind", "family")]
    point = policy.operating_point(Target("quality", 0.98))
    report = evaluate(judged, held_out, [point], left_out)
    gate3 = report.gates["gate3"]
    assert gate3.auroc_wrong >= 0.88
    assert gate3.auroc_wrong > report.single_signals[report.best_single_signal] + 0.05
    assert gate3.ece <= 0.05
    assert gate3.auroc_wrong_interval[0] < gate3.auroc_wrong < gate3.auroc_wrong_interval[1]
    for left, groups in zip(report.leave_out, (16, 48), strict=True):
        assert len(left.groups) == groups
        assert left.median >= 0.75
        assert left.median > left.median_token_confidence
    (routed,) = report.routed
    assert routed.quality_interval[1] >= 0.98
    assert set(report.single_signals) == set(SINGLE_SIGNALS)
    assert json.loads(json.dumps(asdict(report)))["gates"]["gate3"]["ece"] == gate3.ece


def test_calibration_improves_on_the_raw_score(trained: Trained, held_out: list[GradedRow]) -> None:
    router, rows = trained.fitted.routers["cascade"], featurise(held_out, "cascade")
    raw = 1 / (1 + np.exp(-router.score(rows)))
    assert ece(router.probability(rows), gains(held_out)) < ece(raw, gains(held_out))


def test_the_same_rows_give_the_same_files(trained: Trained, policy: Policy, tmp_path: Path) -> None:
    again = write_policy(trained.fitted, trained.material, trained.recipe, tmp_path)
    assert again.card == policy.card


def test_decisions_are_the_same_from_many_threads(policy: Policy, held_out: list[GradedRow]) -> None:
    views = [view_of(row) for row in held_out[:40]]
    alone = [policy.after(view) for view in views]
    with ThreadPoolExecutor(8) as pool:
        for probabilities in pool.map(lambda _: [policy.after(view) for view in views], range(8)):
            assert probabilities == alone


@pytest.mark.parametrize("share", [0.15, 0.2, 0.25, 0.3, 0.4])
def test_a_limit_on_the_share_is_kept_and_used(policy: Policy, judged: CalibrationRows, share: float) -> None:
    up = escalated(judged, policy.thresholds_for(Target("cloud_share", share)))
    assert share - 0.08 <= up.mean() <= share + 0.03


def test_a_run_of_another_model_is_refused(policy: Policy, held_out: list[GradedRow]) -> None:
    view = replace(view_of(held_out[0]), prompt_hidden=np.zeros(7, np.float32))
    with pytest.raises(ConfigurationError, match="24 values of prompt_hidden, but the local model gives 7"):
        policy.after(view)


def test_inference_needs_neither_scikit_learn_nor_torch(trained: Trained) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from updraft.classifier.policy.policy import Policy\n"
        "from updraft.classifier.features.gate_inputs import PromptView\n"
        "assert 'onnxruntime' not in sys.modules\n"
        "policy = Policy.load(Path(sys.argv[1]))\n"
        "assert 0 <= policy.before(PromptView('What is 2 + 2?')) <= 1\n"
        "print(sorted({'sklearn', 'scipy', 'torch', 'onnx', 'llama_cpp', 'openai', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, trained.folder], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
