"""An engine's choice of its own memory, and its words about its context."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.kv.sizing import KVCacheSize, block_bytes
from updraft.cloud_engine.models.config import ModelConfig
from updraft.cloud_engine.models.decoder import Decoder
from updraft.cloud_engine.models.rope import RotaryConfig
from updraft.protocol.errors import ConfigurationError

CONTEXT, GIB = 131072, 2**30


def shape_of(**changes) -> Decoder:
    """Of Llama-3.2-1B, with a small vocabulary and without memory: 65,536 bytes of KV cache for a token."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=64,
        hidden_size=2048,
        intermediate_size=64,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        context_length=CONTEXT,
        rms_norm_eps=1e-5,
        rotary=RotaryConfig.from_parameters({}, rotary_dim=64, context_length=CONTEXT),
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        return Decoder(replace(config, **changes))


@pytest.mark.parametrize("config", [{}, {"block_size": 64}, {"max_num_seqs": 1}], ids=str)
def test_the_pool_stays_within_its_memory_and_the_context_within_the_pool(config) -> None:
    config, model = EngineConfig(**config), shape_of()
    sizes = KVCacheSize.of([model], config)
    assert sizes.num_blocks * block_bytes(model, config.block_size) == GIB
    assert sizes.context_length == GIB // 65536 == sizes.num_blocks * config.block_size


def test_a_draft_model_has_its_share_of_the_memory() -> None:
    models = [shape_of(), shape_of(num_layers=8)]
    sizes = KVCacheSize.of(models, EngineConfig())
    assert sizes.num_blocks * sum(block_bytes(model, 16) for model in models) <= GIB
    assert sizes.context_length == sizes.num_blocks * 16 > 10000


def test_a_shorter_context_is_held_by_more_requests() -> None:
    sizes = KVCacheSize.of([shape_of()], EngineConfig(max_model_len=1000, max_num_seqs=4))
    assert (sizes.context_length, sizes.num_blocks) == (1000, 4 * 63)


def test_a_context_of_the_models_whole_length_is_had_by_blocks_for_it() -> None:
    sizes = KVCacheSize.of([shape_of()], EngineConfig(num_gpu_blocks_override=CONTEXT // 16))
    assert sizes.context_length == CONTEXT


def test_a_window_needs_no_more_than_it_sees() -> None:
    windowed = shape_of(windows=(4096,) * 16)
    sizes = KVCacheSize.of([windowed], EngineConfig(max_num_seqs=2))
    assert (sizes.context_length, sizes.num_blocks) == (CONTEXT, 2 * ((4095 + 512 + 15) // 16 + 1))
    assert KVCacheSize.of([windowed], EngineConfig(num_gpu_blocks_override=100)).context_length == 1600


def test_blocks_fill_the_memory_that_there_is() -> None:
    model, config = shape_of(), EngineConfig(max_num_seqs=256)
    of_block = block_bytes(model, config.block_size)
    for available in (4 * GIB, 4 * GIB + of_block - 1):
        assert KVCacheSize.of([model], config, available).num_blocks == 4 * GIB // of_block
    with pytest.raises(ConfigurationError, match="too little memory for a KV cache"):
        KVCacheSize.of([model], config, of_block - 1)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"max_model_len": CONTEXT + 1}, "max_model_len is 131073 tokens, but the model supports 131072"),
        ({"max_model_len": 20000}, r"1250 blocks of KV cache \(1.2 GiB\), but the cache has 1024: lower .* to 16384"),
        (
            {"max_model_len": 100, "num_gpu_blocks_override": 6},
            "7 blocks .* but the cache has 6: lower .* to 96, or set num_gpu_blocks_override to 7",
        ),
        ({"block_size": 2**15}, "too little memory for a KV cache"),
        ({"max_model_len": 0}, "max_model_len must be 1 to"),
        ({"gpu_memory_utilization": 0.0}, "must be above 0 and at most 1, got 0.0"),
        ({"gpu_memory_utilization": 1.1}, "must be above 0 and at most 1, got 1.1"),
    ],
    ids=str,
)
def test_impossible_sizes_are_refused_with_possible_ones(config, reason) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        KVCacheSize.of([shape_of()], EngineConfig(**config))


def test_the_size_of_the_cache_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "updraft"):
        KVCacheSize.of([shape_of()], EngineConfig())
    assert "16384 of the model's 131072 tokens" in caplog.text
    assert "the whole context needs 8192 (8.0 GiB)" in caplog.text
