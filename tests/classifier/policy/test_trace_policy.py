"""A policy from end to end: trained, exported, loaded, asked; and every way in which a policy folder can be wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from updraft.classifier.evaluation.metrics import ece
from updraft.classifier.features.vectors import GATES
from updraft.classifier.grading.outcomes import Outcome, load, save
from updraft.classifier.policy.trace_policy import Policy, sha256
from updraft.classifier.target import Target
from updraft.classifier.training.leave_one_out import SINGLE_SIGNALS, is_wrong
from updraft.classifier.training.train_trace import Trained, TrainOptions, fit, main, measure, rows_of
from updraft.protocol.errors import ConfigurationError


def test_exported_and_python_agree_on_every_row(
    trained: Trained, policy_folder: Path, calibration: list[Outcome], held_out: list[Outcome]
) -> None:
    rows = [*calibration, *held_out]
    expected = trained.probabilities(rows)
    for gate in GATES:
        session = onnxruntime.InferenceSession(policy_folder / f"{gate}.onnx", providers=["CPUExecutionProvider"])
        x = rows_of(gate, rows, trained.card.gate2_tokens).x
        assert np.abs(session.run(None, {"features": x})[0] - expected[gate]).max() <= 1e-5
        # Far outside the training range too.
        wild = (np.random.default_rng(0).normal(size=x[:200].shape) * 1e3).astype(np.float32)
        probability = session.run(None, {"features": wild})[0]
        assert np.abs(probability - trained.gates[gate].model.probability(wild)).max() <= 1e-5
        assert ((probability >= 0) & (probability <= 1)).all()


def test_the_loaded_policy_gives_the_python_probabilities(
    trained: Trained, policy_folder: Path, held_out: list[Outcome]
) -> None:
    policy = Policy.load(policy_folder)
    assert policy.models == {"local": "small", "cloud": "large"}
    rows = held_out[:50]
    expected = trained.probabilities(rows)
    found = [(policy.before(o.view.prompt), policy.during(o.view), policy.after(o.view)) for o in rows]
    assert np.allclose(np.array(found).T, [expected[gate] for gate in GATES], atol=1e-5)


def test_the_classifier_beats_token_confidence_on_known_and_on_unseen_kinds(
    trained: Trained, held_out: list[Outcome]
) -> None:
    report = measure(trained, held_out, leave_out=["kind", "family"])
    gate3 = report.gates["gate3"]
    assert gate3.auroc_wrong >= 0.88
    assert gate3.auroc_wrong > report.single_signals[report.best_single_signal] + 0.05
    assert gate3.ece <= 0.05
    assert gate3.auroc_wrong_interval[0] < gate3.auroc_wrong < gate3.auroc_wrong_interval[1]
    for left, groups in zip(report.leave_out, (16, 48), strict=True):
        assert len(left.groups) == groups
        assert left.median >= 0.8
        assert left.median > left.median_token_confidence
    routed = next(found for found in report.routed if found.target == 0.98)
    assert routed.quality_interval[1] >= 0.98
    assert routed.simulation.cloud_share <= report.wrong_rate + 0.15
    assert set(report.single_signals) == set(SINGLE_SIGNALS)
    assert json.loads(json.dumps(report.flat()))["gate3.ece"] == gate3.ece


def test_calibration_improves_on_the_raw_score(trained: Trained, held_out: list[Outcome]) -> None:
    model = trained.gates["gate3"].model
    x = rows_of("gate3", held_out, trained.card.gate2_tokens).x
    gain = np.array([o.gain for o in held_out])
    raw = 1 / (1 + np.exp(-model.score(x)))
    assert ece(model.probability(x), gain) < ece(raw, gain)


def test_training_is_deterministic(make_population: Callable[..., list[Outcome]], tmp_path: Path) -> None:
    records = make_population(320, seed=9)
    cards = [fit(records, tmp_path / name, TrainOptions(seed=3, trees=20)).card for name in ("one", "two")]
    assert cards[0] == cards[1]
    assert (tmp_path / "one/gate3.onnx").read_bytes() == (tmp_path / "two/gate3.onnx").read_bytes()


def test_decisions_are_the_same_from_many_threads(
    trained: Trained, policy_folder: Path, held_out: list[Outcome]
) -> None:
    policy = Policy.load(policy_folder)
    views = [o.view for o in held_out[:40]]
    alone = [policy.after(view) for view in views]
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: [policy.after(view) for view in views], range(8)):
            assert found == alone


def test_thresholds_are_those_of_the_next_stricter_target(trained: Trained, policy_folder: Path) -> None:
    policy = Policy.load(policy_folder)
    table = {target.quality: target.thresholds for target in policy.card.thresholds}
    assert policy.thresholds(0.98) == table[0.98]
    assert policy.thresholds(0.981) == table[0.99]
    assert policy.thresholds(0.3) == table[0.9]
    for wrong in (0, -1, 1.01, float("nan")):
        with pytest.raises(ConfigurationError, match="quality"):
            policy.thresholds(wrong)
    short = Policy(replace(policy.card, thresholds=policy.card.thresholds[:2]), {})
    with pytest.raises(ConfigurationError, match=r"calibrated up to quality 0\.95"):
        short.thresholds(0.98)


@pytest.mark.parametrize("share", [0.15, 0.2, 0.25, 0.3, 0.4])
def test_a_limit_on_the_share_is_kept_and_used(policy_folder: Path, held_out: list[Outcome], share: float) -> None:
    policy = Policy.load(policy_folder)
    assert share - 0.06 <= went_up(policy, held_out, Target("cloud_share", share)).mean() <= share + 0.03


def test_a_limit_on_cost_is_kept_and_used(policy_folder: Path, held_out: list[Outcome]) -> None:
    policy = Policy.load(policy_folder)
    dollars = np.array([len(o.view.prompt_logprobs) * 2.0 + len(o.view.logprobs) * 8.0 for o in held_out]) / 1e6
    everything = 1000 * dollars.mean()
    for part in (0.2, 0.4):
        up = went_up(policy, held_out, Target("cost", part * everything, (2.0, 8.0)))
        assert part - 0.08 <= 1000 * (dollars * up).mean() / everything <= part + 0.03
    assert not went_up(policy, held_out, Target("cost", 0.0, (0.5, 1.5))).any()


def test_without_calibration_rows_only_a_quality_can_be_asked_for(trained: Trained) -> None:
    card = replace(trained.card, files={gate: trained.card.files[gate] for gate in GATES})
    bare = Policy(card, {})
    assert bare.thresholds_for(Target("quality", 0.98)) == bare.thresholds(0.98)
    for target in (
        Target("cloud_share", 0.3),
        Target("cost", 1.0, (0.5, 1.5)),
        Target("quality", 0.98, promise="mean"),
    ):
        with pytest.raises(ConfigurationError, match=f"keeps no calibration rows, which {target} needs"):
            bare.thresholds_for(target)


def went_up(policy: Policy, rows: list[Outcome], target: Target) -> np.ndarray:
    found = policy.thresholds_for(target)
    return np.array(
        [
            policy.before(o.view.prompt) > found.before
            or policy.during(o.view) > found.during
            or policy.after(o.view) > found.after
            for o in rows
        ]
    )


def test_a_run_of_another_model_is_refused(trained: Trained, policy_folder: Path, held_out: list[Outcome]) -> None:
    view = replace(held_out[0].view, prompt_hidden=np.zeros(7, np.float32))
    with pytest.raises(ConfigurationError, match="trained for small"):
        Policy.load(policy_folder).after(view)


@pytest.fixture
def copied(trained: Trained, policy_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(policy_folder, tmp_path / "policy"))


def edit_card(folder: Path, **changes: object) -> None:
    path = folder / "policy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_missing_policy_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="There is no policy"):
        Policy.load(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff"])
def test_an_unreadable_card_is_a_configuration_error(copied: Path, text: str) -> None:
    (copied / "policy.json").write_text(text)
    with pytest.raises(ConfigurationError, match="cannot be read as a policy"):
        Policy.load(copied)


@pytest.mark.parametrize("name", ["format_version", "feature_version"])
def test_another_version_is_a_configuration_error(copied: Path, name: str) -> None:
    edit_card(copied, **{name: 999})
    with pytest.raises(ConfigurationError, match=f"{name} 999.*retrain"):
        Policy.load(copied)


def test_a_card_with_wrong_fields_is_a_configuration_error(copied: Path) -> None:
    edit_card(copied, thresholds="many")
    with pytest.raises(ConfigurationError, match="not a valid policy"):
        Policy.load(copied)


def test_damaged_missing_and_foreign_graphs_are_configuration_errors(copied: Path) -> None:
    graph = copied / "gate2.onnx"
    whole = graph.read_bytes()
    graph.write_bytes(whole[:1000])
    with pytest.raises(ConfigurationError, match="damaged or replaced"):
        Policy.load(copied)
    files = json.loads((copied / "policy.json").read_text())["files"]
    edit_card(copied, files=files | {"gate2": sha256(whole[:1000])})
    with pytest.raises(ConfigurationError, match="cannot be run by onnxruntime"):
        Policy.load(copied)
    shutil.copy(copied / "gate3.onnx", graph)
    edit_card(copied, files=files | {"gate2": files["gate3"]})
    with pytest.raises(ConfigurationError, match="features, this version makes"):
        Policy.load(copied)
    graph.unlink()
    with pytest.raises(ConfigurationError, match=r"lacks gate2\.onnx"):
        Policy.load(copied)


def test_inference_needs_neither_scikit_learn_nor_torch(trained: Trained, policy_folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from updraft.classifier.policy.trace_policy import Policy\n"
        "from updraft.classifier.features.vectors import PromptView\n"
        "assert 'onnxruntime' not in sys.modules\n"
        "policy = Policy.load(Path(sys.argv[1]))\n"
        "assert 0 <= policy.before(PromptView('What is 2 + 2?')) <= 1\n"
        "print(sorted({'sklearn', 'torch', 'skl2onnx', 'onnx', 'llama_cpp', 'openai', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, policy_folder], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_outcomes_survive_the_file(tmp_path: Path, calibration: list[Outcome]) -> None:
    odd = replace(
        calibration[0],
        view=replace(
            calibration[0].view,
            answer="",
            logprobs=np.empty(0, np.float32),
            entropies=np.empty(0, np.float32),
            margins=np.empty(0, np.float32),
            answer_hidden=None,
            finish_reason="length",
        ),
        local_score=0.25,
    )
    rows = [odd, *calibration[:20], replace(odd, kind="ünï", view=replace(odd.view, answer="\ud800"))]
    save(rows, tmp_path / "rows.npz")
    found = load(tmp_path / "rows.npz")
    assert len(found) == len(rows)
    for before, after in zip(rows, found, strict=True):
        for name in ("local_score", "cloud_score", "kind", "family", "split"):
            assert getattr(before, name) == getattr(after, name)
        for name in ("prompt", "answer", "finish_reason"):
            assert getattr(before.view, name) == getattr(after.view, name)
        for name in ("logprobs", "entropies", "margins", "prompt_logprobs", "prompt_hidden", "answer_hidden"):
            left, right = getattr(before.view, name), getattr(after.view, name)
            assert (left is None) == (right is None)
            assert left is None or np.array_equal(left, right)
    save([], tmp_path / "none.npz")
    assert load(tmp_path / "none.npz") == []


def test_a_wrong_outcome_file_is_a_configuration_error(tmp_path: Path, calibration: list[Outcome]) -> None:
    path = tmp_path / "rows.npz"
    with pytest.raises(ConfigurationError, match="no outcome file"):
        load(path)
    save(calibration[:5], path)
    whole = path.read_bytes()
    for damaged in (b"", b"not a zip", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigurationError, match="damaged"):
            load(path)


def test_outcomes_that_cannot_train_are_refused(tmp_path: Path, calibration: list[Outcome]) -> None:
    with pytest.raises(ConfigurationError, match="rows with and without gain"):
        fit([o for o in calibration if not o.gain], tmp_path)
    with pytest.raises(ConfigurationError, match="hidden states"):
        fit([], tmp_path)


def test_the_command_trains_evaluates_and_refuses_leaking_tests(
    tmp_path: Path, make_population: Callable[..., list[Outcome]], capsys: pytest.CaptureFixture[str]
) -> None:
    save(make_population(300, seed=5), tmp_path / "cal.npz")
    test = make_population(200, seed=6)
    save(test, tmp_path / "test.npz")
    given = [
        "--outcomes",
        str(tmp_path / "cal.npz"),
        "--out",
        str(tmp_path / "policy"),
        "--date",
        "2026-01-31",
        "--trees",
        "20",
    ]
    figures = tmp_path / "metrics.json"
    assert main([*given, "--test", str(tmp_path / "test.npz"), "--json", str(figures), "--leave-out"]) == 0
    shown = capsys.readouterr().out
    assert "gate3" in shown
    assert "routed" in shown
    metrics = json.loads(figures.read_text())["metrics"]
    assert metrics["wrong_rate"] == pytest.approx(is_wrong(test).mean())
    policy = Policy.load(tmp_path / "policy")
    assert policy.card.metrics == metrics
    assert policy.card.trained_on.date == "2026-01-31"
    with pytest.raises(SystemExit) as stopped:
        main([*given, "--test", str(tmp_path / "cal.npz")])
    assert stopped.value.code == 2
    assert "are in both files" in capsys.readouterr().err
