"""Our Llama over paged blocks against transformers' on the same weights, and every way a folder can be wrong."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from updraft.cloud_engine.engine.runner import Chunk, Runner
from updraft.cloud_engine.models.config import default_temperature
from updraft.cloud_engine.models.llama import Llama
from updraft.cloud_engine.models.loader import load_model
from updraft.protocol.errors import ModelLoadError

torch.set_num_threads(1)

SHAPES: dict[str, dict[str, Any]] = {
    "gqa-tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "mha-untied": {"num_key_value_heads": 4, "tie_word_embeddings": False, "rope_theta": 500000.0},
    "mqa-wide-head": {"num_key_value_heads": 1, "head_dim": 24, "tie_word_embeddings": False},
}
BLOCK = 16


def reference_model(**overrides: Any) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    options = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,  # peaked logits, so that 1e-4 is a demand
        **overrides,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).float().eval()


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    reference = reference_model(**SHAPES[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    return reference, load_model(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    reference_model(**SHAPES["gqa-tied"]).save_pretrained(path)
    return path


def expected_logprobs(reference: transformers.LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0].log_softmax(-1)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits.log_softmax(-1), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 33])
def test_prefill_and_stepwise_decode_match_transformers(pair, prompt: int) -> None:
    reference, model = pair
    tokens = random_tokens(prompt + 20, prompt)
    expected = expected_logprobs(reference, tokens)
    runner, table = Runner(model, 8, BLOCK), [5, 2, 7, 0]
    assert_close(runner.run([Chunk(tokens[:prompt], 0, table, prompt)]), expected[:prompt])
    for position in range(prompt, len(tokens)):
        logits = runner.run([Chunk(tokens[position : position + 1], position, table, 1)])
        assert_close(logits, expected[position : position + 1])


def test_one_ragged_batch_of_prefills_chunks_decodes_and_drafts(pair) -> None:
    reference, model = pair
    lengths = [(0, 40), (16, 30), (31, 32), (100, 101), (47, 52), (5, 6), (15, 17)]  # (already computed, known)
    runner = Runner(model, 64, BLOCK)
    chunks: list[Chunk] = []
    expected: list[torch.Tensor] = []
    blocks = iter(torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist())
    for seed, (computed, known) in enumerate(lengths):
        tokens = random_tokens(known, seed)
        table = [next(blocks) for _ in range(-(-known // BLOCK))]
        if computed:
            runner.run([Chunk(tokens[:computed], 0, table, 0)])
        chunks.append(Chunk(tokens[computed:], computed, table, known - computed))
        expected.append(expected_logprobs(reference, tokens)[computed:])
    assert_close(runner.run(chunks), torch.cat(expected))


def test_chunked_prefill_equals_whole(pair) -> None:
    reference, model = pair
    tokens = random_tokens(90)
    runner, table = Runner(model, 6, BLOCK), [3, 1, 4, 0, 5, 2]
    borders = [0, 1, 16, 20, 64, 90]
    logits = [runner.run([Chunk(tokens[a:b], a, table, b - a)]) for a, b in pairwise(borders)]
    assert_close(torch.cat(logits), expected_logprobs(reference, tokens))


def test_bfloat16_weights_are_upcast_and_both_rope_notations_load(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "bf16")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, tmp_path / "bf16" / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    (tmp_path / "bf16" / "config.json").write_text(json.dumps({**config, "rope_theta": 12345.0}))
    model = load_model(tmp_path / "bf16")
    assert model.config.rope_theta == 12345.0
    assert load_model(folder).config.rope_theta == 10000.0
    assert model.embed_tokens.weight.dtype is torch.float32
    assert torch.equal(model.embed_tokens.weight, weights["model.embed_tokens.weight"].float())
    assert model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_weights(folder: Path, *, drop: str | None = None, **add: torch.Tensor) -> None:
    weights = load_file(folder / "model.safetensors")
    if drop is not None:
        del weights[drop]
    save_file({**weights, **add}, folder / "model.safetensors")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES = {
    "no such folder": (shutil.rmtree, r"config\.json does not exist"),
    "config is not json": (lambda f: (f / "config.json").write_text("{"), "not readable JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "JSON object"),
    "config lacks a size": (lambda f: edit_config(f, hidden_size=None), "lacks hidden_size"),
    "unknown architecture": (lambda f: edit_config(f, architectures=["FooLM"]), "'FooLM' is unknown; supported: Llama"),
    "rope scaling": (lambda f: edit_config(f, rope_parameters={"rope_type": "yarn"}), "rope_type='yarn'"),
    "attention bias": (lambda f: edit_config(f, attention_bias=True), "attention_bias=True"),
    "heads do not divide": (lambda f: edit_config(f, num_key_value_heads=3), "cannot share"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors does not exist"),
    "truncated weights": (lambda f: truncate(f / "model.safetensors"), "damaged"),
    "foreign weights": (lambda f: (f / "model.safetensors").write_bytes(b"GGUF" * 99), "damaged"),
    "missing tensor": (lambda f: edit_weights(f, drop="model.norm.weight"), r"lacks tensors: model\.norm\.weight"),
    "unexpected tensor": (lambda f: edit_weights(f, extra=torch.ones(1)), "unexpected tensors: extra"),
    "wrong shape": (
        lambda f: edit_weights(f, **{"model.norm.weight": torch.ones(7)}),
        r"model\.norm\.weight has shape \(7,\)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_with_the_reason(folder: Path, tmp_path: Path, damage: str) -> None:
    harm, reason = DAMAGES[damage]
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    harm(broken)
    with pytest.raises(ModelLoadError, match=reason):
        load_model(broken)


def test_default_temperature_follows_generation_config(tmp_path: Path) -> None:
    assert default_temperature(tmp_path) == 1.0
    for raw, expected in (({"do_sample": False, "temperature": 0.7}, 0.0), ({"temperature": 0.6}, 0.6)):
        (tmp_path / "generation_config.json").write_text(json.dumps(raw))
        assert default_temperature(tmp_path) == expected


def test_grouping_never_lets_a_query_see_another_sequence(pair) -> None:
    _, model = pair
    assert isinstance(model, Llama)
    alone, together = Runner(model, 8, BLOCK), Runner(model, 8, BLOCK)
    ours, others = random_tokens(20, 1), random_tokens(20, 2)
    expected = alone.run([Chunk(ours, 0, [0, 1], 20)])
    mixed = together.run([Chunk(others, 0, [2, 3], 0), Chunk(ours, 0, [0, 1], 20)])
    torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=0)
