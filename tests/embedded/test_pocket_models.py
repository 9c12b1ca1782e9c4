"""The packaged pair: its formats agree with each other, it is as good as its cards say, and it fits its budget."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the [cloud] extra")
pytest.importorskip("llama_cpp", reason="needs the [edge] extra")

from updraft.embedded import pocket
from updraft.embedded.collect import cloud_answers, collect
from updraft.embedded.export import write_gguf
from updraft.embedded.tasks import check, make_tasks
from updraft.local_engine.engine import LocalEngine
from updraft.protocol.requests import Message


def test_f16_gguf_and_safetensors_give_the_same_log_probabilities(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the [train] extra")
    from transformers import AutoModelForCausalLM

    folder = pocket.pocket_small_folder()
    write_gguf(folder, tmp_path / "small-f16.gguf", "F16")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with LocalEngine.load(tmp_path / "small-f16.gguf") as engine, torch.inference_mode():
        for task in make_tasks("test", 100):
            ids = engine.encode_chat([Message("user", task.prompt), Message("assistant", task.answer)])
            ours = engine.score(ids)
            theirs = torch.log_softmax(reference(torch.tensor([ids])).logits[0], -1).numpy()
            # Half precision moves log-probabilities deep in the tail, of no consequence: compare what can happen.
            likely = theirs > np.log(1e-4)
            assert np.abs(ours - theirs)[likely].max() < 1e-2, task.prompt


def test_the_pair_is_as_good_as_promised_on_a_sample_of_held_out_tasks() -> None:
    tasks = make_tasks("test", 480, seed=11)
    outcomes = collect(tasks, pocket.pocket_small_gguf(), pocket.pocket_large_folder(), "test")
    small = np.mean([o.local_score for o in outcomes])
    large = np.mean([o.cloud_score for o in outcomes])
    # The full 4,000-task figures are in the cards; a sample of 480 strays up to four standard errors from them.
    assert large > 0.90 - 0.05
    assert 0.45 - 0.09 < small < 0.75 + 0.09
    assert large - small > 0.20 - 0.09


@pytest.mark.parametrize("name", [pocket.SMALL, pocket.LARGE])
def test_the_card_states_every_kind_and_a_figure_within_the_promise(name: str) -> None:
    card = (pocket.WEIGHTS / name / "MODEL_CARD.md").read_text()
    accuracy = float(re.search(r"\*\*([\d.]+) %\*\*", card)[1])
    assert accuracy >= 90 if name == pocket.LARGE else 45 <= accuracy <= 75
    assert len(re.findall(r"^\| [a-z-]+ \| \d+ \|", card, re.M)) == 25  # 24 kinds and "all"


def test_sizes_stay_within_budget() -> None:
    files = [f for f in pocket.WEIGHTS.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) < 40e6
    training = json.loads((pocket.pocket_large_folder() / "training.json").read_text())
    assert training["parameters"] <= 16e6


def test_batched_and_single_cloud_answers_are_the_same() -> None:
    tasks = make_tasks("test", 24, seed=4)
    together = cloud_answers(tasks, pocket.pocket_large_folder())
    alone = [cloud_answers([task], pocket.pocket_large_folder())[0] for task in tasks[:6]]
    assert together[:6] == alone
    assert any(check(task, text) for task, text in zip(tasks, together, strict=True))
