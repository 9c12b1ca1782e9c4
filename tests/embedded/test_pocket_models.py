"""The packaged pair: its formats agree with each other, it is as good as its cards say, and it fits its budget."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the [cloud] extra")
pytest.importorskip("llama_cpp", reason="needs the [edge] extra")

from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.request import GenerationRequest
from updraft.embedded import pocket
from updraft.embedded.collect import cloud_answers, collect
from updraft.embedded.export import FileType, write_gguf
from updraft.embedded.kinds import KINDS
from updraft.embedded.tasks import check, make_tasks
from updraft.local_engine.engine import LocalEngine
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingParams


def distances(gguf: Path) -> tuple[float, float]:
    """Largest differences of log-probability between a GGUF in llama.cpp and the safetensors in torch, 100 tasks.

    Over every token of the questions as they stand, and over the whole vocabulary after every token of question and
    answer.
    """
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(pocket.pocket_small_folder(), dtype=torch.float32).eval()
    of_prompts, of_anything = 0.0, 0.0
    with LocalEngine.load(gguf) as engine, torch.inference_mode():
        for task in make_tasks("test", 100):
            question = Message("user", task.prompt)
            ids = engine.encode_chat([question, Message("assistant", task.answer)])
            theirs = torch.log_softmax(reference(torch.tensor([ids])).logits[0], -1).numpy()
            difference = np.abs(engine.score(ids) - theirs)
            n = len(engine.encode_chat([question]))
            of_prompts = max(of_prompts, float(difference[np.arange(n - 1), ids[1:n]].max()))
            of_anything = max(of_anything, float(difference.max()))
    return of_prompts, of_anything


@pytest.mark.parametrize("file_type", ["F32", "F16"])
def test_gguf_and_safetensors_give_the_same_log_probabilities(tmp_path: Path, file_type: FileType) -> None:
    pytest.importorskip("gguf", reason="needs the [train] extra")
    write_gguf(pocket.pocket_small_folder(), tmp_path / "small.gguf", file_type)
    of_prompts, of_anything = distances(tmp_path / "small.gguf")
    assert of_prompts < 1e-2
    assert file_type == "F16" or of_anything < 1e-3


def stated_accuracy(name: str) -> float:
    """The share of held-out tasks that the model's card says it gets right."""
    card = (pocket.WEIGHTS / name / "MODEL_CARD.md").read_text()
    found = re.search(r"\*\*([\d.]+) %\*\*", card)
    assert found, f"the card of {name} states no accuracy"
    return float(found[1]) / 100


def test_a_fresh_sample_of_held_out_tasks_bears_the_cards_out() -> None:
    tasks = make_tasks("test", 480, seed=11)
    outcomes = collect(tasks, pocket.pocket_small_gguf(), pocket.pocket_large_folder(), "test")
    for name, right in (
        (pocket.SMALL, [o.local_score for o in outcomes]),
        (pocket.LARGE, [o.cloud_score for o in outcomes]),
    ):
        stated = stated_accuracy(name)
        standard_error = np.sqrt(stated * (1 - stated) / len(tasks))
        assert abs(np.mean(right) - stated) < 4 * standard_error, name


def test_the_cards_state_every_kind() -> None:
    for name in (pocket.SMALL, pocket.LARGE):
        card = (pocket.WEIGHTS / name / "MODEL_CARD.md").read_text()
        rows = re.findall(r"^\| ([a-z-]+) \| \d+ \| [\d.]+ % \| [\d.]+ % \|", card, re.MULTILINE)
        assert sorted(rows) == sorted([*KINDS, "all"])


def test_the_small_model_is_useful_and_the_large_one_better_by_a_wide_margin() -> None:
    small, large = stated_accuracy(pocket.SMALL), stated_accuracy(pocket.LARGE)
    assert 0.45 <= small <= 0.75
    assert large - small >= 0.20


def test_the_large_model_is_right_nine_times_in_ten() -> None:
    assert stated_accuracy(pocket.LARGE) >= 0.90


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


def test_the_file_on_the_device_is_a_draft_in_the_cloud() -> None:
    prompts = [task.prompt for task in make_tasks("test", 12, seed=5)]
    answers: list[dict[str, list[int]]] = []
    for draft in (None, pocket.pocket_small_gguf()):
        engine = Engine.from_folder(pocket.pocket_large_folder(), draft=draft, config=EngineConfig())
        tokens: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts):
            ids = engine.tokenizer.encode_chat([Message("user", prompt)])
            engine.add_request(GenerationRequest(str(number), ids, SamplingParams(temperature=0.0, max_tokens=60)))
        while engine.has_work:
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        answers.append(tokens)
        stats = engine.stats()
        assert (stats.draft_accepted > stats.draft_proposed / 4) == (draft is not None)
    assert answers[0] == answers[1]
