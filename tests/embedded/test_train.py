"""Training runs, resumes to the very same weights, and exports what both engines read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("transformers", reason="needs the [train] extra")

from safetensors.torch import load_file
from updraft.embedded.tokenizer import load_tokenizer
from updraft.embedded.train import RECIPES, Batches, schedule

TINY = ["--model", "small", "--seed", "3", "--workers", "0", "--device", "cpu", "--eval-tasks", "0"]
SIZE = ["--set", "hidden=32", "heads=2", "kv_heads=1", "layers=1", "feed_forward=64", "tokens=1024"]


def run(out: Path, steps: int) -> None:
    command = [sys.executable, "-m", "updraft.embedded.train", *TINY, "--out", str(out), "--steps", str(steps), *SIZE]
    subprocess.run(command, check=True, capture_output=True, timeout=240)


def test_a_short_training_lowers_the_loss_resumes_and_is_deterministic(tmp_path: Path) -> None:
    run(tmp_path / "a", 12)
    run(tmp_path / "b", 12)
    first, second = (load_file(tmp_path / x / "model" / "model.safetensors") for x in "ab")
    assert all(torch.equal(first[name], second[name]) for name in first)
    # A finished run resumed has nothing left to do and keeps its weights.
    run(tmp_path / "b", 12)
    again = load_file(tmp_path / "b" / "model" / "model.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)
    report = json.loads((tmp_path / "a" / "report.json").read_text())
    assert report["recipe"]["steps"] == 12


def test_batches_depend_on_their_number_alone_and_cut_no_task() -> None:
    tokenizer = load_tokenizer()
    batches = Batches(tokenizer, RECIPES["small"])
    rows = batches[11]
    assert (rows == Batches(tokenizer, RECIPES["large"])[11]).all(), "both models must see the same stream"
    ids = rows & 0x7FFF
    start, stop = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    assert (ids[:, 0] == start).all()
    assert ((ids == start).sum(1) == (ids == stop).sum(1)).all()
    assert (ids != 0).mean() > 0.8


def test_the_schedule_warms_up_holds_and_ends_at_nothing() -> None:
    recipe = RECIPES["large"]
    factors = [schedule(recipe, step) for step in range(recipe.steps)]
    assert factors[0] < 0.02
    assert max(factors) == 1.0
    assert factors[recipe.steps // 2] == 1.0
    assert 0 < factors[-1] < 0.01
