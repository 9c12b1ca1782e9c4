"""Training runs, resumes to the very same weights, and exports what both engines read."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("transformers", reason="needs the [train] extra")

from safetensors.torch import load_file
from updraft.embedded import train as train_module
from updraft.embedded.pocket import pocket_small_folder
from updraft.embedded.tokenizer import load_tokenizer
from updraft.embedded.train import RECIPES, Batches, batch_loss, build_model, load_weights, schedule, train

TINY = ["--model", "small", "--seed", "3", "--workers", "0", "--device", "cpu", "--eval-tasks", "0"]
SIZE = ["--set", "hidden=32", "heads=2", "kv_heads=1", "layers=1", "feed_forward=64", "tokens=1024"]


def options(out: Path) -> list[str]:
    return [*TINY, "--out", str(out), "--steps", "6", *SIZE]


def run(out: Path) -> None:
    command = [sys.executable, "-m", "updraft.embedded.train", *options(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)


class Interrupted(Exception):
    """A stand-in for a kill in the middle of training."""


def test_a_run_that_was_cut_off_ends_in_the_very_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(RECIPES["small"], hidden=32, heads=2, kv_heads=1, feed_forward=64, steps=8, tokens=1024, warmup=2)
    machine = train_module.TrainingMachine("cpu", workers=0, compile=False)
    whole = train(recipe, tmp_path / "whole", machine, build_model(recipe)).state_dict()
    show = train_module.Progress.show

    def cut_off(self: train_module.Progress, step: int, loss: torch.Tensor) -> None:
        show(self, step, loss)
        if step == 5:
            raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(train_module, "_SAVE_EVERY_S", 0.0)
        patch.setattr(train_module.Progress, "show", cut_off)
        with pytest.raises(Interrupted):
            train(recipe, tmp_path / "cut", machine, build_model(recipe))
    assert torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)["step"] == 4
    resumed = train(recipe, tmp_path / "cut", machine, build_model(recipe)).state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_command_is_deterministic_and_a_finished_run_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        run(tmp_path / name)
    first, second = (load_file(tmp_path / name / "model" / "model.safetensors") for name in "ab")
    assert all(torch.equal(first[name], second[name]) for name in first)
    # A finished run resumed has nothing left to do and keeps its weights.
    monkeypatch.setattr(sys, "argv", ["train", *options(tmp_path / "b")])
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    (tmp_path / "b" / "report.json").unlink()
    train_module.main()
    again = load_file(tmp_path / "b" / "model" / "model.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)
    report = json.loads((tmp_path / "b" / "report.json").read_text())
    assert report["recipe"]["steps"] == 6


@pytest.mark.parametrize("index", [11, 15], ids=["tasks-apart", "conversation"])
def test_batches_depend_on_their_number_alone_and_cut_no_task(index: int) -> None:
    tokenizer = load_tokenizer()
    rows, segments = Batches(tokenizer, RECIPES["small"])[index]
    again = Batches(tokenizer, RECIPES["large"])[index]
    assert (rows == again[0]).all(), "both models must see the same stream"
    assert (segments == again[1]).all()
    ids = rows & 0x7FFF
    start, stop = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    assert (ids[:, 0] == start).all()
    assert ((ids == start).sum(1) == (ids == stop).sum(1)).all()
    assert (ids != 0).mean() > 0.9


def test_tasks_of_a_short_row_are_segments_of_their_own() -> None:
    tokenizer = load_tokenizer()
    rows, segments = Batches(tokenizer, RECIPES["small"])[0]
    starts = tokenizer.token_to_id("<|im_start|>")
    for row, numbers in zip(rows & 0x7FFF, segments, strict=True):
        for number in set(numbers.tolist()) - {0}:
            inside = row[:-1][numbers == number]
            assert inside[0] == starts
            assert (inside == starts).sum() == 2, "a question and its answer"
    assert (segments.max(1) > segments.min(1)).all()


def test_a_packed_task_is_read_and_weighed_as_if_it_stood_alone() -> None:
    tokenizer = load_tokenizer()
    model = build_model(replace(RECIPES["small"], hidden=32, heads=2, feed_forward=64)).eval()
    rows, segments = (torch.tensor(part) for part in Batches(tokenizer, RECIPES["small"])[0])
    rows, segments = rows[:1].long(), segments[:1]
    with torch.inference_mode():
        packed = model((rows & 0x7FFF)[:, :-1], segments)
        losses, weights = [], []
        for number in segments.unique():
            where = (segments[0] == number).nonzero().flatten()
            span = slice(int(where[0]), int(where[-1]) + 1)
            alone = model((rows & 0x7FFF)[:, span])
            torch.testing.assert_close(packed[:, span], alone, rtol=1e-4, atol=1e-5)
            targets = (
                rows[:, span.start + 1 : span.stop] if span.stop < rows.shape[1] - 1 else rows[:, span.start + 1 :]
            )
            weight = torch.where(targets >= 1 << 15, 1.0, 0.1) * (targets & 0x7FFF != 0)
            each = torch.nn.functional.cross_entropy(
                alone[0, : targets.shape[1]], (targets & 0x7FFF)[0], reduction="none"
            )
            losses.append((each * weight[0]).sum())
            weights.append(weight.sum())
        expected = sum(losses) / sum(weights)
        assert batch_loss(model, rows, segments, 0) == pytest.approx(float(expected), rel=1e-4)


def test_the_schedule_warms_up_holds_and_ends_at_nothing() -> None:
    recipe = RECIPES["large"]
    factors = [schedule(recipe, step) for step in range(recipe.steps)]
    assert factors[0] < 0.02
    assert max(factors) == 1.0
    assert factors[recipe.steps // 2] == 1.0
    assert 0 < factors[-1] < 0.01


def test_training_resumes_from_an_exported_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "first")
    start = tmp_path / "first" / "model"
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    command = ["train", "--start-from", str(start), *options(tmp_path / "next")]
    monkeypatch.setattr(sys, "argv", [*command, "learning_rate=0"])
    train_module.main()
    first, then = load_file(start / "model.safetensors"), load_file(tmp_path / "next" / "model" / "model.safetensors")
    assert all(torch.equal(first[name], then[name]) for name in first)
    started = json.loads((tmp_path / "next" / "report.json").read_text())["started_from"]
    assert started["weights_sha256"] == hashlib.sha256((start / "model.safetensors").read_bytes()).hexdigest()
    assert started["recipe"] == json.loads((tmp_path / "first" / "report.json").read_text())["recipe"]


def test_a_start_of_another_size_or_from_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="model of the recipe's size"):
        load_weights(build_model(RECIPES["large"]), pocket_small_folder())
    with pytest.raises(SystemExit, match="--start-from"):
        load_weights(build_model(RECIPES["small"]), tmp_path)
