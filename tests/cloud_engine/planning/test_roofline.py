"""The predicted speed of decoding, against figures computed by hand from the data sheet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from updraft.bench.engine.shapes import random_model, shape_config
from updraft.cloud_engine.models.config import ExpertsConfig, LatentConfig
from updraft.cloud_engine.planning.roofline import GPUS, num_weights, predicted_decode

LLAMA, H100 = shape_config("llama-3.1-8b"), GPUS["NVIDIA H100 80GB HBM3"]


def test_an_8b_model_on_an_h100() -> None:
    """32 layers of 41,943,040 weights of attention and 176,160,768 of the feed-forward, and a head of 525,336,576.

    At 2 bytes and 3.35 TB/s, they are read in 4.4804 ms. A token of context has 131,072 bytes of keys and values.
    """
    assert num_weights(LLAMA) == 32 * (41_943_040 + 176_160_768) + 525_336_576 == 7_504_658_432
    by_hand = {  # batch, context: sequences that fit, ms per step
        (1, 1024): (1, 4.4804 + 0.0401),  # 134,217,728 bytes of keys and values
        (64, 1024): (64, 4.4804 + 2.5642),
        (256, 1024): (256, 4.4804 + 10.2566),
        (1, 8192): (1, 4.4804 + 0.3205),
        (64, 8192): (53, 4.4804 + 16.9876),  # (73.6e9 - 16.0600e9) / 1,073,741,824 = 53.6
        (256, 8192): (53, 4.4804 + 16.9876),
    }
    for (batch, context), (sequences, step_ms) in by_hand.items():
        predicted = predicted_decode(LLAMA, H100, batch, context)
        assert predicted.sequences == sequences
        assert 1e3 * predicted.step_s == pytest.approx(step_ms, abs=2e-3)
        assert predicted.tokens_per_s == pytest.approx(1e3 * sequences / step_ms, rel=1e-3)
    assert round(predicted_decode(LLAMA, H100, 1, 1024).tokens_per_s) == 221
    assert round(predicted_decode(LLAMA, H100, 256, 1024).tokens_per_s) == 17_371


def test_large_batches_are_bound_by_tensor_cores() -> None:
    """1,000 sequences: 2 * 7,504,658,432 * 1,000 operations at 989.5 per picosecond take 15.169 ms."""
    roomy = replace(H100, memory=1e15)
    step_s = predicted_decode(LLAMA, roomy, 1000, 1).step_s
    assert 1e3 * step_s == pytest.approx(15.1686 + 1000 * 131_072 / 3.35e9, rel=1e-3)


def test_windows_limit_what_is_read() -> None:
    windowed = replace(LLAMA, windows=(512,) * 16 + (None,) * 16)
    full, cut = (predicted_decode(model, H100, 1, 8192).step_s for model in (LLAMA, windowed))
    assert full - cut == pytest.approx(16 * 4096 * (8192 - 512) / 3.35e12)


EXPERTS = ExpertsConfig(8, 2, 48, (False, True), shared_size=32, gates_shared=True)


@pytest.mark.parametrize(
    "differences",
    [
        {},
        {"experts": EXPERTS},
        {"num_kv_heads": 4, "head_dim": 32, "latent": LatentConfig(24, 40, 16, True, 20)},
        {"num_kv_heads": 4, "head_dim": 32, "latent": LatentConfig(24, None, 16, True, 20), "experts": EXPERTS},
    ],
)
def test_weights_are_those_of_the_model(differences: dict[str, Any]) -> None:
    small = replace(LLAMA, vocab_size=64, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, head_dim=16)
    model = random_model(replace(small, **{"num_kv_heads": 2, **differences}), torch.float32, torch.device("cpu"))
    matrices = sum(each.numel() for each in model.parameters() if each.dim() > 1) - model.embed_tokens.weight.numel()
    assert num_weights(model.config) == matrices


def test_a_step_reads_the_experts_that_its_tokens_use() -> None:
    """128 experts of 3 * 2,048 * 768 weights in each of 48 layers, 8 of which a token uses."""
    experts = ExpertsConfig(128, 8, 768, (True,) * 48)
    model = replace(LLAMA, hidden_size=2048, num_layers=48, num_heads=32, num_kv_heads=4, experts=experts)
    others = num_weights(model) - 48 * 128 * 4_718_592
    kv_s = 2 * 2 * 4 * 128 * 48 / H100.bandwidth
    for sequences, used in ((1, 8.0), (2, 15.5), (64, 128 * (1 - (120 / 128) ** 64))):
        step_s = predicted_decode(model, replace(H100, memory=1e15), sequences, 1).step_s
        weights = others + 48 * used * 4_718_592
        assert step_s == pytest.approx(2 * weights / H100.bandwidth + sequences * kv_s, rel=1e-6)
