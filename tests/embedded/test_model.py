"""The model as trained is the model as served, and sees nothing of the future, compiled or not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")

from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.embedded.export import write_hf_folder
from updraft.embedded.model import ModelShape, PocketLlama
from updraft.embedded.tokenizer import VOCAB_SIZE, load_tokenizer
from updraft.embedded.train import TrainingRecipe, build_model, model_config
from updraft.protocol.sampling import SamplingParams

TINY = TrainingRecipe(hidden=64, layers=2, heads=4, kv_heads=2, feed_forward=96, learning_rate=1e-3, steps=1)


@pytest.fixture
def model() -> PocketLlama:
    return build_model(TINY).eval()


def test_the_served_model_continues_as_the_trained_one(model: PocketLlama, tmp_path: Path) -> None:
    # bf16 on disk: round the trained weights the same way before comparing.
    state = {name: tensor.bfloat16().float() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    write_hf_folder(tmp_path / "tiny", model_config(TINY), state, load_tokenizer())
    engine = Engine.from_folder(tmp_path / "tiny", config=EngineConfig(num_gpu_blocks_override=64))
    prompt = list(range(10, 40))
    params = SamplingParams(max_tokens=20, temperature=0.0)
    engine.add_request(GenerationRequest("r", prompt, params))
    served: list[int] = []
    while engine.has_work:
        served += [token for output in engine.step() for token in output.token_ids]
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in served:
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert tokens[len(prompt) :] == served
    assert served


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_position_sees_a_later_token(model: PocketLlama, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    if compiled:
        from torch._inductor import config

        # Torch would compile ten programs to find the vector instructions that the compiler knows.
        monkeypatch.setattr(config.cpp, "vec_isa_ok", True)
    run = torch.compile(model, dynamic=False) if compiled else model
    tokens = torch.randint(0, VOCAB_SIZE, (2, 32), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 20:] = 5
    with torch.no_grad():
        before, after = run(tokens)[:, :20], run(changed)[:, :20]
    torch.testing.assert_close(before, after, atol=1e-5, rtol=0)


def test_parameter_names_are_hugging_faces() -> None:
    names = set(PocketLlama(ModelShape(16, 8, 1, 2, 1, 16)).state_dict())
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert "model.embed_tokens.weight" in names
    assert all(name.startswith("model.") for name in names)
