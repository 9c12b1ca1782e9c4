"""Every family over paged blocks against transformers on the same weights."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_reference import FACTORS, LONG_ONLY, SHAPES, expected_logprobs, random_tokens, reference_model
from forward_chunks import Chunk, compute
from safetensors.torch import load_file, save_file
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.models.decoder import Decoder
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.protocol.errors import ModelLoadError

torch.set_num_threads(1)
BLOCK = 16


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    architecture, options = SHAPES[request.param]
    reference = reference_model(architecture, **options)
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    return reference, load_model(folder)


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits.log_softmax(-1), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 33])
def test_prefill_and_stepwise_decode_match_transformers(pair: tuple[Any, Decoder], prompt: int) -> None:
    reference, model = pair
    tokens = random_tokens(prompt + 20, prompt)
    expected = expected_logprobs(reference, tokens)
    runner, table = Runner(model, 8, BLOCK), [5, 2, 7, 0]
    assert_close(compute(runner, [Chunk(tokens[:prompt], 0, table, prompt)]), expected[:prompt])
    for position in range(prompt, len(tokens)):
        logits = compute(runner, [Chunk(tokens[position : position + 1], position, table, 1)])
        assert_close(logits, expected[position : position + 1])


def test_one_ragged_batch_of_prefills_chunks_decodes_and_drafts(pair: tuple[Any, Decoder]) -> None:
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
            compute(runner, [Chunk(tokens[:computed], 0, table, 0)])
        chunks.append(Chunk(tokens[computed:], computed, table, known - computed))
        expected.append(expected_logprobs(reference, tokens)[computed:])
    assert_close(compute(runner, chunks), torch.cat(expected))


def test_chunked_prefill_equals_whole(pair: tuple[Any, Decoder]) -> None:
    reference, model = pair
    tokens = random_tokens(90)
    runner, table = Runner(model, 6, BLOCK), [3, 1, 4, 0, 5, 2]
    borders = [0, 1, 16, 20, 64, 90]
    logits = [compute(runner, [Chunk(tokens[a:b], a, table, b - a)]) for a, b in pairwise(borders)]
    assert_close(torch.cat(logits), expected_logprobs(reference, tokens))


@pytest.mark.parametrize("shape", ["llama-3.1", "mistral-window", "qwen2-yarn", "qwen3", "gemma3", "phi3"])
def test_long_contexts_in_large_blocks(tmp_path: Path, shape: str) -> None:
    architecture, options = SHAPES[shape]
    reference = reference_model(architecture, **{**options, "max_position_embeddings": 2048})
    reference.save_pretrained(tmp_path)
    tokens, table = random_tokens(1100), [*range(17, -1, -1)]
    runner = Runner(load_model(tmp_path), 18, 64)
    borders = [0, 500, 640, 641, 1100]
    logits = [compute(runner, [Chunk(tokens[a:b], a, table, b - a)]) for a, b in pairwise(borders)]
    assert_close(torch.cat(logits), expected_logprobs(reference, tokens))


def test_longrope_takes_the_long_factors_where_the_context_is_long(tmp_path: Path) -> None:
    architecture, options = LONG_ONLY
    reference = reference_model(architecture, **options)
    reference.save_pretrained(tmp_path)
    tokens = random_tokens(90)
    model = load_model(tmp_path)
    logits = compute(Runner(model, 6, BLOCK), [Chunk(tokens, 0, [3, 1, 4, 0, 5, 2], 90)])
    assert_close(logits, expected_logprobs(reference, tokens))
    plain = 10000.0 ** -torch.arange(0, 8, 2).div(8)
    long = plain / torch.tensor(FACTORS["long_factor"])
    torch.testing.assert_close(torch.tensor(model.config.rotary.inverse_frequencies), long)


def test_a_window_reads_no_block_out_of_its_reach(tmp_path: Path) -> None:
    reference = reference_model("Mistral", num_key_value_heads=2, sliding_window=20)
    reference.save_pretrained(tmp_path)
    tokens = random_tokens(90)
    runner, table = Runner(load_model(tmp_path), 7, BLOCK), [3, 1, 4, 0, 5, 2]
    compute(runner, [Chunk(tokens[:80], 0, table, 0)])
    lost = [6, 6, 6, *table[3:]]  # block 6 was never written
    logits = compute(runner, [Chunk(tokens[80:], 80, lost, 10)])
    assert_close(logits, expected_logprobs(reference, tokens)[80:])


def test_grouping_never_lets_a_query_see_another_sequence(pair: tuple[Any, Decoder]) -> None:
    _, model = pair
    alone, together = Runner(model, 8, BLOCK), Runner(model, 8, BLOCK)
    ours, others = random_tokens(20, 1), random_tokens(20, 2)
    expected = compute(alone, [Chunk(ours, 0, [0, 1], 20)])
    mixed = compute(together, [Chunk(others, 0, [2, 3], 0), Chunk(ours, 0, [0, 1], 20)])
    torch.testing.assert_close(mixed, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("decoder", "head", "vision"),
    [
        ("language_model.model", "language_model.lm_head", "vision_tower."),
        ("model.language_model", "lm_head", "model.multi_modal_projector."),
    ],
)
def test_gemma_is_read_from_a_wrapper_with_a_vision_tower(tmp_path: Path, decoder: str, head: str, vision: str) -> None:
    """Released files say little of the text tower: the rest are the defaults of its architecture."""
    architecture, options = SHAPES["gemma3"]
    reference = reference_model(architecture, **options, tie_word_embeddings=False)
    reference.save_pretrained(tmp_path)
    weights = {
        f"{decoder}.{name.removeprefix('model.')}" if name.startswith("model.") else name.replace("lm_head", head): each
        for name, each in load_file(tmp_path / "model.safetensors").items()
    }
    save_file({**weights, f"{vision}weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    text.pop("architectures")
    wrapper = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    tokens = random_tokens(40)
    logprobs = compute(Runner(load_model(tmp_path), 3, 16), [Chunk(tokens, 0, [2, 0, 1], 40)]).log_softmax(-1)
    torch.testing.assert_close(logprobs, expected_logprobs(reference, tokens), atol=1e-4, rtol=0)
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps({**wrapper, "text_config": text}))
    with pytest.raises(ModelLoadError, match="has the wrong shape"):  # and so the defaults were read
        load_model(tmp_path)


def test_layers_without_rotation_are_listed(tmp_path: Path) -> None:
    reference_model("SmolLM3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for wrong in ([1, 0], [1, 1, 2], "all"):
        (tmp_path / "config.json").write_text(json.dumps({**config, "no_rope_layers": wrong}))
        with pytest.raises(ModelLoadError, match="no_rope_layers must have 0 or 1 for each of 3 layers"):
            load_model(tmp_path)
