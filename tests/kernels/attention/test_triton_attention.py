"""A whole pass behind the models' interface: what was stored is attended to, layer by layer, as the CPU does it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from updraft.kernels.attention.launch import AttentionShape
from updraft.kernels.attention.metadata import AttentionPlanner
from updraft.kernels.attention.ragged_batch import RaggedBatch
from updraft.kernels.attention.torch_attention import TorchAttention
from updraft.kernels.attention.triton_attention import TritonAttention
from updraft.kernels.attention.types import CacheScales, LayerAttention, QuerySpan
from updraft.kernels.kv_cache.types import HeadNorms, Rotation
from updraft.protocol.errors import ConfigurationError

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=16, block_size=16, cache_bytes=4)
PLANNER = AttentionPlanner(SHAPE, DEVICE, 8)
LAYERS = [LayerAttention(0, 0.25), LayerAttention(1, 0.3, window=5)]
TABLES = [[3, 1, 5], [2, 4]]
STEPS = [
    [QuerySpan(0, 20, TABLES[0]), QuerySpan(0, 3, TABLES[1])],
    [QuerySpan(20, 1, TABLES[0]), QuerySpan(3, 17, TABLES[1])],
    [QuerySpan(21, 4, TABLES[0]), QuerySpan(20, 1, TABLES[1])],
]


def empty_cache(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(2, 6, 16, 4, 16).to(DEVICE, dtype)


def test_steps_of_a_pass_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    plain_cache, cache = empty_cache().transpose(2, 3).contiguous(), empty_cache()
    for spans in STEPS:
        rows = sum(span.length for span in spans)
        metadata = PLANNER.metadata(spans, rows + 2)
        plain = TorchAttention(plain_cache, RaggedBatch.of(spans, rows + 2, 16), group_size=2)
        attention = TritonAttention(cache, metadata, SHAPE)
        for layer in LAYERS:
            projected = torch.randn(rows + 2, 8, 16, device=DEVICE)
            expected = plain.attend(layer, projected.clone(), None)
            torch.testing.assert_close(attention.attend(layer, projected, None), expected)
    assert torch.equal(cache, plain_cache.transpose(2, 3))


def test_norm_and_rotation_before_attention() -> None:
    torch.manual_seed(0)
    spans = STEPS[0]
    projected = torch.randn(23, 8, 16, device=DEVICE)
    positions = torch.tensor([*range(20), *range(3)], device=DEVICE)
    frequencies = tuple(10000 ** (-pair / 8) for pair in range(8))
    table = positions.float()[:, None] * torch.tensor(frequencies, device=DEVICE)
    weight = torch.randn(16, device=DEVICE)
    normed = torch.nn.functional.rms_norm(projected[:, :6], (16,), weight, 1e-6)
    turned = torch.cat((-normed[..., 8:], normed[..., :8]), dim=-1)  # as transformers writes it
    angles = torch.cat((table, table), dim=-1)[:, None]
    separate = torch.cat((normed * angles.cos() + turned * angles.sin(), projected[:, 6:]), dim=1)
    metadata = PLANNER.metadata(spans)
    expected = TritonAttention(empty_cache(), metadata, SHAPE).attend(LAYERS[0], separate, None)
    given = TritonAttention(empty_cache(), metadata, SHAPE).attend(
        LAYERS[0], projected, Rotation(table.cos(), table.sin()), HeadNorms(weight, weight, 1e-6)
    )
    torch.testing.assert_close(given, expected)


def test_fp8_cache_with_scales() -> None:
    """Of numbers that FP8 holds exactly: the interpreter (3.9) rounds up to a power of two wrongly."""
    torch.manual_seed(0)
    shape = AttentionShape(4, 2, 16, 16, cache_bytes=1)
    metadata = AttentionPlanner(shape, DEVICE, 8).metadata(STEPS[0])
    query, small = (
        torch.randn(23, 4, 16, device=DEVICE),
        torch.randn(23, 4, 16, device=DEVICE).to(torch.float8_e4m3fn).float(),
    )
    scales = CacheScales(key=2.0**-5, value=2.0**-7)
    key_value = torch.cat((small[:, :2] * scales.key, small[:, 2:] * scales.value), dim=1)
    expected = TritonAttention(empty_cache(), PLANNER.metadata(STEPS[0]), SHAPE).attend(
        LAYERS[0], torch.cat((query, key_value), dim=1), None
    )
    attention = TritonAttention(empty_cache(torch.float8_e4m3fn), metadata, shape, scales=scales)
    torch.testing.assert_close(attention.attend(LAYERS[0], torch.cat((query, key_value), dim=1), None), expected)


def test_caches_and_queries_that_do_not_fit() -> None:
    metadata = PLANNER.metadata(STEPS[0])
    for cache in (empty_cache()[..., :8], empty_cache(torch.float16), empty_cache().transpose(0, 1)):
        with pytest.raises(ConfigurationError):
            TritonAttention(cache, metadata, SHAPE)
    with pytest.raises(ConfigurationError):
        TritonAttention(empty_cache(), metadata, SHAPE, scales=CacheScales())
    attention = TritonAttention(empty_cache(), metadata, SHAPE)
    for projected in (
        torch.randn(22, 8, 16, device=DEVICE),
        torch.randn(23, 8, 16, device=DEVICE).half(),
        torch.randn(23, 16, 8, device=DEVICE).transpose(1, 2),
    ):
        with pytest.raises(ConfigurationError):
            attention.attend(LAYERS[0], projected, None)
