"""Models in every checkpoint format against transformers with the dequantised weights, on one rank and on two."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_reference import expected_logprobs, reference_model
from greedy_answers import SIZES, TOKENS, answered, likeliest
from quantized_checkpoints import KINDS, write_quantized
from thread_group import ThreadGroup
from torch import Tensor
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.kernels.linear.ops import QuantizedLinear

torch.set_num_threads(1)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_models_equal_their_dequantised_weights(tmp_path: Path, kind: str, size: int) -> None:
    is_plain_head = kind not in ("gptq-8", "awq-32")
    model = reference_model("Llama", **SIZES, vocab_size=104)
    write_quantized(model, tmp_path, KINDS[kind](), plain=("lm_head",) if is_plain_head else ())
    if size == 2 and kind.endswith("order"):
        pytest.skip("inputs in another order cannot be split: see test_refusals")
    with ThreadPoolExecutor(size) as ranks:
        results = list(ranks.map(lambda group: answered(tmp_path, group), ThreadGroup.of(size)))
    for logprobs, answer in results:
        torch.testing.assert_close(logprobs, expected_logprobs(model, TOKENS), atol=1e-4, rtol=0)
        assert answer == likeliest(model)


@pytest.mark.parametrize("kind", ["awq-32", "gptq-8-v2-order", "fp8-block", "int-channel", "pack-4-asymmetric"])
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Phi3", {}),
        ("Gemma3", {"head_dim": 32, "sliding_window": 18, "query_pre_attn_scalar": 24}),
    ],
)
def test_other_families(tmp_path: Path, architecture: str, options: dict[str, Any], kind: str) -> None:
    """Biases, fused projections, a tied head, more norms."""
    model = reference_model(architecture, **SIZES, **options)
    write_quantized(model, tmp_path, KINDS[kind]())
    logprobs, answer = answered(tmp_path)
    torch.testing.assert_close(logprobs, expected_logprobs(model, TOKENS), atol=1e-4, rtol=0)
    assert answer == likeliest(model)


def test_layers_follow_the_checkpoint(tmp_path: Path) -> None:
    model = reference_model("Llama", **SIZES)
    write_quantized(model, tmp_path, KINDS["pack-4-group"](), plain=("lm_head", "layers.0.mlp.down_proj"))
    loaded = load_model(tmp_path)
    kinds = {name: isinstance(module, QuantizedLinear) for name, module in loaded.named_modules() if "proj" in name}
    assert [name for name, is_quantized in kinds.items() if not is_quantized] == ["layers.0.mlp.down_proj"]
    assert not isinstance(loaded.lm_head, QuantizedLinear)
    torch.testing.assert_close(answered(tmp_path)[0], expected_logprobs(model, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["awq-128", "gptq-8", "fp8-block", "int-channel", "pack-4-asymmetric"])
def test_memory_is_that_of_the_file(tmp_path: Path, kind: str) -> None:
    model = reference_model("Llama", **SIZES)
    write_quantized(model, tmp_path, KINDS[kind]())
    runner = Runner(load_model(tmp_path, dtype=torch.bfloat16), 4, 16)
    held = 0
    for module in runner.model.modules():
        tensors = [*module.__dict__.values(), *module._buffers.values(), *module._parameters.values()]
        held += sum(each.nbytes for each in tensors if isinstance(each, Tensor))
    plain = sum(each.numel() for name, each in model.named_parameters() if "proj" not in name)
    stored = (tmp_path / "model.safetensors").stat().st_size - 2 * plain  # in the file, these have 4 bytes, not 2
    assert held < 1.15 * stored
