"""The packaged pair: its formats agree with each other, it is as good as its cards say, and it fits its budget."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the [cloud] extra")
pytest.importorskip("llama_cpp", reason="needs the [edge] extra")

from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.embedded import pocket
from updraft.embedded.collect import cloud_answers
from updraft.embedded.export import FileType, write_gguf
from updraft.embedded.tasks import check, make_tasks
from updraft.local_engine.engine import LocalEngine
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingParams


def distances(gguf: Path, *, half_inputs: bool, seed: int) -> tuple[float, float]:
    """Largest differences of log-probability between a GGUF in llama.cpp and the safetensors in torch, 100 tasks.

    Over every token of the questions as they stand, and over the whole vocabulary after every token of question and
    answer. `half_inputs`: round what goes into each matrix product to F16, as llama.cpp does before F16 matrices.
    """
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(pocket.pocket_small_folder(), dtype=torch.float32).eval()
    if half_inputs:
        for module in reference.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda _, inputs: (inputs[0].half().float(),))
    of_prompts, of_anything = 0.0, 0.0
    with LocalEngine.load(gguf) as engine, torch.inference_mode():
        for task in make_tasks("test", 100, seed):
            question = Message("user", task.prompt)
            ids = engine.encode_chat([question, Message("assistant", task.answer)])
            theirs = torch.log_softmax(reference(torch.tensor([ids])).logits[0], -1).numpy()
            difference = np.abs(engine.score(ids) - theirs)
            n = len(engine.encode_chat([question]))
            of_prompts = max(of_prompts, float(difference[np.arange(n - 1), ids[1:n]].max()))
            of_anything = max(of_anything, float(difference.max()))
    return of_prompts, of_anything


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("file_type", ["F32", "F16"])
def test_gguf_and_safetensors_give_the_same_log_probabilities(tmp_path: Path, file_type: FileType, seed: int) -> None:
    pytest.importorskip("gguf", reason="needs the [train] extra")
    write_gguf(pocket.pocket_small_folder(), tmp_path / "small.gguf", file_type)
    of_prompts, of_anything = distances(tmp_path / "small.gguf", half_inputs=file_type == "F16", seed=seed)
    assert of_prompts < 1e-2
    # Rounding to F16 makes a difference in the last bit a thousand times larger.
    assert file_type == "F16" or of_anything < 1e-3


@pytest.mark.xfail(strict=True, reason="0.014: llama.cpp rounds what goes into F16 matrices, torch does not")
def test_an_f16_file_gives_the_log_probabilities_of_plain_torch(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the [train] extra")
    write_gguf(pocket.pocket_small_folder(), tmp_path / "small.gguf", "F16")
    of_prompts, _ = distances(tmp_path / "small.gguf", half_inputs=False, seed=0)
    assert of_prompts < 1e-2


def test_sizes_stay_within_budget() -> None:
    files = [f for f in pocket.WEIGHTS.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) < 40e6


def test_batched_and_single_cloud_answers_are_the_same() -> None:
    tasks = make_tasks("test", 24, seed=4)
    together = cloud_answers(tasks, pocket.pocket_large_folder())
    alone = [cloud_answers([task], pocket.pocket_large_folder())[0] for task in tasks[:6]]
    assert together[:6] == alone
    assert any(check(task, text) for task, text in zip(tasks, together, strict=True))


def test_the_file_on_the_device_is_a_draft_in_the_cloud() -> None:
    prompts = [task.prompt for task in make_tasks("test", 12, seed=5)]
    answers: list[dict[str, list[int]]] = []
    config = EngineConfig(draft_length="fixed")  # measured times of a busy machine may forbid drafts
    for draft in (None, pocket.pocket_small_gguf()):
        engine = Engine.from_folder(pocket.pocket_large_folder(), draft=draft, config=config)
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
