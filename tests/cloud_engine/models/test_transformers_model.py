"""Architectures that transformers computes over this engine's paged attention: the same as transformers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_reference import expected_logprobs, random_tokens, reference_model
from forward_chunks import Chunk, compute
from safetensors.torch import load_file, save_file
from thread_group import ThreadGroup
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.engine.worker.served_model import DraftWeights, ServedModel, load_weights
from updraft.cloud_engine.models.loading.loader import load_any_model, load_model
from updraft.cloud_engine.models.sharding import ALONE
from updraft.cloud_engine.models.transformers_model import TransformersModel
from updraft.protocol.errors import ConfigurationError, ModelLoadError
from updraft.protocol.sampling import SamplingParams

torch.set_num_threads(1)

#: Architectures without a family, with what distinguishes them.
SHAPES: dict[str, dict[str, Any]] = {
    "Arcee": {"num_key_value_heads": 2},
    "Cohere": {"num_key_value_heads": 2, "logit_scale": 0.5, "use_qk_norm": True},
    "Cohere2": {"num_key_value_heads": 2, "sliding_window": 18, "head_dim": 16},
    "Ernie4_5": {"num_key_value_heads": 2, "head_dim": 16},
    "Exaone4": {"num_key_value_heads": 2, "sliding_window": 18, "sliding_window_pattern": 2, "head_dim": 16},
    "Dots1": {
        "num_key_value_heads": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "GPT2": {},
    "Gemma": {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True},
    "GPTNeoX": {"use_parallel_residual": True, "rotary_pct": 0.5},
    "Glm": {"num_key_value_heads": 2, "head_dim": 16},
    "Glm4": {"num_key_value_heads": 2, "head_dim": 16},
    "Granite": {
        "num_key_value_heads": 2,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.4,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
    },
    "Helium": {"num_key_value_heads": 2, "head_dim": 16},
    "Olmo": {"num_key_value_heads": 2, "clip_qkv": 3.0},
    "Olmoe": {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
    "Phi": {"num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "SeedOss": {"num_key_value_heads": 2, "head_dim": 16},
    "Starcoder2": {"num_key_value_heads": 2, "sliding_window": 18},
}

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def _written(folder: Path, architecture: str, **overrides: Any) -> Any:
    reference = reference_model(architecture, **{**SHAPES.get(architecture, {}), **overrides})
    reference.save_pretrained(folder)
    return reference


def _loaded(folder: Path) -> TransformersModel:
    model = load_any_model(folder, dtype=torch.float32, device="cpu")
    assert isinstance(model, TransformersModel)
    return model


@pytest.mark.parametrize("architecture", SHAPES)
def test_prompts_chunks_and_decodes_equal_transformers(tmp_path: Path, architecture: str) -> None:
    reference = _written(tmp_path, architecture)
    runner, first, second = Runner(_loaded(tmp_path), 12, 16), random_tokens(50, 1), random_tokens(23, 2)
    compute(runner, [Chunk(first[:30], 0, [3, 1, 7, 4], 0)])
    mixed = compute(runner, [Chunk(second[:22], 0, [5, 0], 22), Chunk(first[30:49], 30, [3, 1, 7, 4], 19)])
    last = compute(runner, [Chunk(first[49:], 49, [3, 1, 7, 4], 1), Chunk(second[22:], 22, [5, 0], 1)])
    ours, theirs = expected_logprobs(reference, first), expected_logprobs(reference, second)
    expected = torch.cat((theirs[:22], ours[30:49], ours[49:], theirs[22:]))
    actual = torch.cat((mixed, last)).log_softmax(-1)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_the_engine_serves_it_with_drafts_shared_prompts_and_preemption(tmp_path: Path) -> None:
    """Many requests in a small pool, whose drafts come from a native model: each answer is the greedy one."""
    reference = _written(tmp_path / "model", "Granite")
    draft = reference_model("Llama")
    draft.save_pretrained(tmp_path / "draft")
    config = EngineConfig(block_size=16, num_gpu_blocks_override=14, max_num_seqs=4, max_num_batched_tokens=64)
    weights = load_weights(tmp_path / "model", config)
    assert isinstance(weights, TransformersModel)
    engine = Engine(ServedModel(weights), config, draft=DraftWeights(load_model(tmp_path / "draft")))
    prompts = [random_tokens(40), *(random_tokens(20) + random_tokens(9, seed) for seed in range(5))]
    params = SamplingParams(temperature=0, max_tokens=40)
    for number, prompt in enumerate(prompts):
        engine.add_request(GenerationRequest(str(number), prompt, params))
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    assert engine.stats().preemptions > 0
    for number, prompt in enumerate(prompts):
        given = torch.tensor([prompt])
        expected = reference.generate(given, max_new_tokens=40, do_sample=False, use_cache=True)[0, len(prompt) :]
        assert answers[str(number)] == expected.tolist()


@pytest.mark.parametrize(
    ("architecture", "overrides", "reason"),
    [
        ("Gemma2", {"num_key_value_heads": 2, "head_dim": 16}, "options that are not supported: softcap"),
        ("Mamba", {}, "cannot be replaced|other state"),
        (
            "Glm",
            {"head_dim": 16, "rope_parameters": DYNAMIC},
            "kind dynamic",
        ),
        ("Nemotron", {"num_key_value_heads": 2}, "does not hand options on"),
        ("Bloom", {}, "cannot be replaced|transformers cannot load"),
    ],
)
def test_what_cannot_be_served_is_named(
    tmp_path: Path, architecture: str, overrides: dict[str, Any], reason: str
) -> None:
    _written(tmp_path, architecture, **overrides)
    with pytest.raises(ModelLoadError, match=reason) as raised:
        _loaded(tmp_path)
    assert architecture in raised.value.message


def test_a_missing_tensor_and_a_foreign_architecture_are_named(tmp_path: Path) -> None:
    _written(tmp_path, "Arcee")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"missing tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        _loaded(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["FooLM"], "model_type": "foo"}))
    with pytest.raises(ModelLoadError, match="transformers cannot load FooLM"):
        _loaded(tmp_path)


def test_code_of_a_checkpoint_never_runs(tmp_path: Path) -> None:
    _written(tmp_path, "Arcee")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["OwnLM"], "model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('the code ran')")
    with pytest.raises(ModelLoadError, match="transformers cannot load OwnLM"):
        _loaded(tmp_path)


@pytest.mark.parametrize(
    ("options", "param"), [({"quantization": "int8"}, "quantization"), ({"tensor_parallel": 2}, "tensor_parallel")]
)
def test_options_of_native_families_are_refused(tmp_path: Path, options: dict[str, Any], param: str) -> None:
    _written(tmp_path, "Arcee")
    config = EngineConfig(**options)
    ranks = ThreadGroup.of(2)[0] if param == "tensor_parallel" else ALONE
    with pytest.raises(ConfigurationError, match="transformers computes ArceeForCausalLM") as raised:
        load_weights(tmp_path, config, group=ranks)
    assert raised.value.param == param
