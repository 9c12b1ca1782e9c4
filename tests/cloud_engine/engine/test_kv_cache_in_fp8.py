"""A KV cache in FP8: as transformers with keys and values that are rounded to FP8, and half the memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_reference import SHAPES, expected_logprobs, random_tokens, reference_model
from forward_chunks import Chunk, compute
from rounded_attention import with_rounded_cache
from updraft.cloud_engine.engine.config import CacheOptions, EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.kv.sizing import block_bytes
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.engine.worker.served_model import DraftWeights, ServedModel
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.protocol.errors import ConfigurationError


@pytest.mark.parametrize("shape", ["llama-gqa-tied", "mistral-window", "qwen3", "gemma3-scaled"])
def test_logits_are_those_of_rounded_keys_and_values(tmp_path: Path, shape: str) -> None:
    architecture, options = SHAPES[shape]
    reference = reference_model(architecture, **options)
    reference.save_pretrained(tmp_path)
    tokens, table = random_tokens(60), [3, 1, 4, 0]
    exact, expected = expected_logprobs(reference, tokens), expected_logprobs(with_rounded_cache(reference), tokens)
    runner = Runner(load_model(tmp_path), 5, 16, cache=CacheOptions(dtype="fp8"))
    prompt = compute(runner, [Chunk(tokens[:40], 0, table, 40)])
    logits = torch.cat((prompt, *(compute(runner, [Chunk([tokens[at]], at, table, 1)]) for at in range(40, 60))))
    error = (logits.log_softmax(-1) - expected).abs()
    # A key that lies between two FP8 numbers may be rounded to the other one: float32 sums differ in their last bits.
    assert error.max() < 0.02
    assert error.mean() < 0.02 * (exact - expected).abs().mean()


def test_a_block_takes_a_quarter_of_float32(tmp_path: Path) -> None:
    reference_model("Llama").save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert 4 * block_bytes(model, 16, "fp8") == block_bytes(model, 16)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_other_backends_say_why_they_cannot(tmp_path: Path, backend: Any) -> None:
    reference_model("Llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"float8_e4m3fn|not on a CUDA device"):
        Runner(load_model(tmp_path), 4, 16, cache=CacheOptions(backend, "fp8"))
    with pytest.raises(ConfigurationError, match="kv_cache_dtype must be auto or fp8, got 'int3'"):
        EngineConfig(kv_cache_dtype="int3")  # type: ignore[arg-type]


def test_drafts_shared_prompts_and_preemption_change_no_answer(
    make_prompts: Callable[..., list[list[int]]], ask: Callable[..., Any], run: Callable[..., Any], tmp_path: Path
) -> None:
    reference = reference_model("Llama", num_key_value_heads=2)
    reference.save_pretrained(tmp_path)

    def answers(**config: Any) -> list[list[int]]:
        engine = Engine(
            ServedModel(load_model(tmp_path)),
            EngineConfig(kv_cache_dtype="fp8", **config),
            draft=DraftWeights(load_model(tmp_path)) if config.get("ngram") else None,
        )
        return [result.token_ids for result in run(engine, ask(make_prompts(12)))]

    alone = answers(max_num_seqs=1)
    assert answers() == alone
    assert answers(ngram=True, num_gpu_blocks_override=24) == alone
