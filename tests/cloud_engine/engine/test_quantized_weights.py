"""A model in INT4 answers as the model with the dequantised weights: with drafts and grammars, and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_reference import reference_model
from quantized_checkpoints import KINDS, write_quantized
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.worker.served_model import DraftWeights, ServedModel, load_weights
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.kernels.linear.ops import QuantizedLinear
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.sampling import SamplingParams
from updraft.protocol.structured import Constraint
from updraft.text.tokenizer import Tokenizer

POCKET = Path(__file__).resolve().parents[3] / "embedded" / "weights" / "pocket-large"
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2, "num_hidden_layers": 2}
PROMPTS = [[5, 7, 9], list(range(20, 60)), [400, 3, 400, 3, 400, 3]]
GRAMMAR = Constraint("regex", "[a-f ]{20,30}", "structured_outputs")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model in INT4, and with the dequantised weights."""
    packed, plain = (tmp_path_factory.mktemp(name) for name in ("packed", "plain"))
    model = reference_model("Llama", **SIZES, vocab_size=1059, max_position_embeddings=448)
    write_quantized(model, packed, KINDS["awq-32"]())
    model.save_pretrained(plain)
    return packed, plain


@pytest.mark.parametrize("constraint", [None, GRAMMAR], ids=["free", "grammar"])
@pytest.mark.parametrize("drafts", ["no drafts", "ngram", "quantised draft model"])
def test_greedy_answers(folders: tuple[Path, Path], drafts: str, constraint: Constraint | None, run: Callable) -> None:
    tokenizer = Tokenizer.from_folder(POCKET)

    def answers(folder: Path, draft: Path | None = None, **config: Any) -> list[list[int]]:
        served = ServedModel(load_model(folder), tokenizer=tokenizer, eos_ids=tokenizer.eos_ids)
        engine = Engine(served, EngineConfig(**config), draft=DraftWeights(load_model(draft)) if draft else None)
        params = SamplingParams(temperature=0.0, max_tokens=24)
        requests = [GenerationRequest(f"r{i}", ids, params, constraint=constraint) for i, ids in enumerate(PROMPTS)]
        return [result.token_ids for result in run(engine, requests)]

    packed, plain = folders
    draft = packed if drafts == "quantised draft model" else None
    assert answers(packed, draft, ngram=drafts == "ngram") == answers(plain)


@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_plain_models_are_quantised_at_load(tmp_path: Path, method: Any, run: Callable) -> None:
    reference_model("Llama", **SIZES).save_pretrained(tmp_path)
    model = load_weights(tmp_path, EngineConfig(quantization=method))
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == 2 * 4 + 1  # with the head
    for name, module in load_model(tmp_path).named_modules():
        if name.endswith("_proj"):
            weight = model.get_submodule(name).weight
            error = (weight.dequantized() - module.weight).norm() / module.weight.norm()
            assert error < {"fp8": 0.03, "int8": 0.01, "int4": 0.11}[method]
    params = SamplingParams(temperature=0.0, max_tokens=5)
    (result,) = run(Engine(ServedModel(model), EngineConfig()), [GenerationRequest("r", [5, 7, 9], params)])
    assert len(result.token_ids) == 5


def test_a_tied_head_stays_plain(tmp_path: Path) -> None:
    reference_model("Qwen2", **SIZES, tie_word_embeddings=True).save_pretrained(tmp_path)
    model = load_weights(tmp_path, EngineConfig(quantization="int8", dtype="bfloat16"))
    assert model.lm_head.weight is model.embed_tokens.weight
    assert isinstance(model.layers[0].attention.qkv_proj, QuantizedLinear)
    assert model.layers[0].attention.qkv_proj.get_buffer("bias").dtype == torch.bfloat16


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="quantization must be fp8 or int8 or int4, got 'awq'"):
        EngineConfig(quantization="awq")  # type: ignore[arg-type]


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_gguf_file_is_its_own_draft_model(tmp_path: Path, is_tied: bool, run: Callable) -> None:
    pytest.importorskip("gguf", reason="needs the [cloud] extra")
    from gguf_writer import write_gguf

    write_gguf(
        reference_model("Llama", **SIZES, vocab_size=1059, tie_word_embeddings=is_tied), tmp_path / "model.gguf", "Q4_1"
    )
    params = SamplingParams(temperature=0.0, max_tokens=24)
    requests = [GenerationRequest(f"r{i}", PROMPTS[i], params) for i in range(3)]

    def answers(draft: DraftWeights | None) -> list[list[int]]:
        engine = Engine(ServedModel(load_model(tmp_path / "model.gguf")), EngineConfig(), draft=draft)
        return [result.token_ids for result in run(engine, requests)]

    assert answers(DraftWeights(load_model(tmp_path / "model.gguf"))) == answers(None)
