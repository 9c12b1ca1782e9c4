"""GGUF weights stay packed: equal to the library's dequantised ones, on one rank and on two, in the file's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="needs the [cloud] extra")

from decoder_reference import expected_logprobs, reference_model
from forward_chunks import Chunk, compute
from gguf_writer import dequantise, write_gguf
from greedy_answers import SIZES, TOKENS, answered, likeliest
from real_model import SMOLLM2, needs_smollm2
from thread_group import ThreadGroup
from torch import Tensor, nn
from updraft.bench.engine.formats import held_bytes
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.models.compile import compile_decoder
from updraft.cloud_engine.models.formats.format import StoredWeight, alike, joined
from updraft.cloud_engine.models.formats.gguf import GGUF_BLOCKS
from updraft.cloud_engine.models.loading.gguf_file import GgufFile
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.cloud_engine.models.sharding import Shard
from updraft.kernels.linear.ops import QuantizedLinear, pack_linears
from updraft.protocol.errors import ConfigurationError

TYPES = [gguf.GGMLQuantizationType(kind).name for kind in GGUF_BLOCKS]
SIMPLE = [name for name in TYPES if not name.endswith("K")]  # types that gguf-py writes
#: Bits per number in memory, over those in the file.
MEMORY = {"Q4_0": 1.0, "Q4_1": 1.0, "Q5_0": 1.55, "Q5_1": 1.5, "Q8_0": 1.0, "Q4_K": 1.03, "Q5_K": 1.58, "Q6_K": 1.31}


def drawn(name: str, outputs: int = 48, inputs: int = 512) -> tuple[StoredWeight, Tensor, int]:
    """A decoded matrix of random blocks, its plain weight, and the bytes of the blocks."""
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    blocks = rng.integers(0, 256, (outputs, inputs // block, size), dtype=np.uint8)
    for start in {"Q6_K": [208]}.get(name, [0, 2] if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0]):
        halves = (rng.standard_normal(blocks.shape[:2]) * 10.0 ** rng.integers(-6, 0, blocks.shape[:2])).astype("<f2")
        blocks[..., start : start + 2] = halves[..., None].view(np.uint8)
    rows = blocks.reshape(outputs, -1)
    stored = GGUF_BLOCKS[int(kind)].decode({"weight": torch.from_numpy(rows)}, inputs)
    return stored, torch.from_numpy(gguf.quants.dequantize(rows, kind).copy()), rows.nbytes


@pytest.mark.parametrize("name", TYPES)
def test_layers(name: str) -> None:
    stored, plain, size = drawn(name)
    packed = stored.pack()
    assert torch.equal(packed.dequantized(), plain)
    chosen = torch.tensor([5, 0, 47, 5])
    assert torch.equal(packed.rows(chosen).dequantized(), plain[chosen])
    held = sum(each.nbytes for each in QuantizedLinear(packed, None, torch.float32).buffers())
    assert held <= MEMORY[name] * size


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", TYPES)
def test_ranks_take_parts(name: str, ranks: int) -> None:
    stored, plain, _ = drawn(name, 64, 1024)
    for dim in (0, 1):
        shards = [Shard(dim, (plain.shape[dim] // 8,), 8, group) for group in ThreadGroup.of(ranks)]
        parts = [stored.take(shard).pack().dequantized() for shard in shards]
        assert torch.equal(torch.cat(parts, dim), plain)


def test_blocks_are_not_split_across_ranks() -> None:
    shard = Shard(1, (768,), 1, ThreadGroup.of(2)[0])
    with pytest.raises(ConfigurationError, match=r"3 groups of 256 inputs in a layer.*Use 1 or 3"):
        drawn("Q4_K", 16, 768)[0].take(shard)


@pytest.mark.parametrize("second", TYPES)
@pytest.mark.parametrize("first", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_types_that_differ_are_joined(first: str, second: str) -> None:
    pairs = [drawn(name) for name in (first, second)]
    whole = joined(alike([stored for stored, _, _ in pairs])).pack()
    expected = torch.cat([plain for _, plain, _ in pairs])
    torch.testing.assert_close(whole.dequantized(), expected, atol=0, rtol=1e-6)


def mixed(name: str) -> str:
    """As in files of llama.cpp: values and some other matrices have more bits."""
    return "Q8_0" if "v_proj" in name or "embed" in name else "Q5_1" if "down" in name else "Q4_1"


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", [*SIMPLE, "mixed"])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Gemma3"])
def test_models_equal_their_dequantised_weights(tmp_path: Path, architecture: str, kind: str, size: int) -> None:
    """Rotary pairs that llama.cpp stores adjacent, biases, tied heads, scaled embeddings."""
    types: Callable[[str], str] = mixed if kind == "mixed" else lambda _: kind
    extras: dict[str, dict[str, Any]] = {
        "Llama": {},
        "Qwen2": {"tie_word_embeddings": True},
        "Gemma3": {"num_hidden_layers": 7, "num_key_value_heads": 1, "head_dim": 32, "query_pre_attn_scalar": 32},
    }
    if architecture == "Gemma3" and size == 2:
        pytest.skip("one KV head")
    model = reference_model(architecture, **(SIZES | {"vocab_size": 104} | extras[architecture]))
    path = tmp_path / "model.gguf"
    write_gguf(model, path, types)
    dequantise(model, types)
    with ThreadPoolExecutor(size) as ranks:
        results = list(ranks.map(lambda group: answered(path, group), ThreadGroup.of(size)))
    for logprobs, answer in results:  # the order of sums differs, in up to seven layers
        torch.testing.assert_close(logprobs, expected_logprobs(model, TOKENS), atol=2e-4, rtol=0)
        assert answer == likeliest(model)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_memory_is_that_of_the_file(tmp_path: Path, kind: str, is_tied: bool) -> None:
    model = reference_model("Llama", **SIZES, vocab_size=2048, tie_word_embeddings=is_tied)
    write_gguf(model, tmp_path / "model.gguf", kind)
    runner = Runner(load_model(tmp_path / "model.gguf", dtype=torch.bfloat16), 4, 16)
    tensors = sum(tensor.size for tensor in GgufFile(tmp_path / "model.gguf")._header.tensors)
    assert held_bytes(runner.model) < 1.02 * tensors
    compiled = compile_decoder(runner.model)
    assert compiled is None or compiled.can_continue


def test_other_types_are_dequantised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def types(name: str) -> str:
        return "TQ2_0" if "down" in name else "F16" if "k_proj" in name else "Q8_0"

    model = reference_model("Llama", **SIZES)
    write_gguf(model, tmp_path / "model.gguf", types)
    with caplog.at_level(logging.WARNING):
        loaded = load_model(tmp_path / "model.gguf")
    assert "dequantizing 6 tensors (Q8_0, TQ2_0)" in caplog.text  # with the other parts of two QKV layers
    packed = {name for name, module in loaded.layers[0].named_modules() if isinstance(module, QuantizedLinear)}
    assert packed == {"attention.o_proj", "mlp.gate_up_proj"}
    dequantise(model, types)
    logprobs, _ = answered(tmp_path / "model.gguf")
    torch.testing.assert_close(logprobs, expected_logprobs(model, TOKENS), atol=1e-4, rtol=0)


def test_a_packed_file_is_not_quantised_again(tmp_path: Path) -> None:
    write_gguf(reference_model("Llama", **SIZES), tmp_path / "model.gguf", "Q8_0")
    with pytest.raises(ConfigurationError, match=r"is quantized already \(gguf\)"):
        load_model(tmp_path / "model.gguf", quantization="int8")


@needs_smollm2
@pytest.mark.slow
def test_a_real_model_keeps_its_memory_and_perplexity() -> None:
    tokens = list(Path(__file__).read_bytes()[:400])  # any ids: both models get the same
    packed, plain = load_model(SMOLLM2), load_model(SMOLLM2)
    header = GgufFile(SMOLLM2)._header
    for name, module in plain.named_modules():
        if isinstance(module, QuantizedLinear) and name != "embed_tokens.head":
            layer = nn.Linear(*reversed(module.shape), bias=False)
            layer.weight = nn.Parameter(module.weight.dequantized(), requires_grad=False)
            plain.set_submodule(name, layer)
    runners = [Runner(model, 26, 16) for model in (packed, plain)]
    assert held_bytes(packed) < 1.15 * sum(tensor.size for tensor in header.tensors)
    logits = [compute(runner, [Chunk(tokens, 0, list(range(26)), len(tokens))]) for runner in runners]
    nll = [nn.functional.cross_entropy(rows[:-1], torch.tensor(tokens[1:])).item() for rows in logits]
    assert abs(nll[0] - nll[1]) < 0.01
    pack_linears(packed)  # stays as it is
