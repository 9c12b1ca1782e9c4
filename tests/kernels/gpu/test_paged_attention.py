"""On a GPU: bf16 and FP8 attention against float64, in eager mode and replayed from a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_checks import Place, ReplayedAttention, attention_error, filled_cache
from device_waits import forbid_device_waits
from updraft.kernels.attention.launch import AttentionShape
from updraft.kernels.attention.metadata import AttentionPlanner
from updraft.kernels.attention.triton_attention import TritonAttention
from updraft.kernels.attention.types import LayerAttention
from updraft.kernels.kv_cache.reference import write_kv_reference_
from updraft.kernels.kv_cache.types import HeadNorms, HeadTransform, Rotation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
BF16 = Place(CUDA, torch.bfloat16, torch.bfloat16)
FP16 = Place(CUDA, torch.float16, torch.float16)
FP8 = Place(CUDA, torch.bfloat16, torch.float8_e4m3fn)
LLAMA_8B: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
QWEN_05B: dict[str, Any] = {"heads": 14, "kv_heads": 2, "head_dim": 64}
PHI: dict[str, Any] = {"heads": 32, "kv_heads": 32, "head_dim": 96}
GEMMA: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_dim": 256}
BATCHES = {
    "decode": [(5000, 1), (0, 1), (63, 1), (64, 1), (1023, 1)],
    "one long sequence": [(40000, 1)],
    "verification": [(3000, 8), (17, 5), (900, 1)],
    "prefill": [(0, 700), (1300, 257)],
    "mixed": [(9000, 1), (0, 300), (4000, 6), (0, 0), (15, 1)],
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    ("sizes", "window", "place"),
    [(LLAMA_8B, None, BF16), (LLAMA_8B, 300, BF16), (LLAMA_8B, None, FP8), (QWEN_05B, None, BF16),
     (LLAMA_8B, None, FP16), (PHI, None, BF16), (GEMMA, 1000, BF16)],
)  # fmt: skip
def test_attention(sizes: dict[str, Any], window: int | None, place: Place, block_size: int, batch: str) -> None:
    torch.manual_seed(0)
    itemsize = place.cache_dtype.itemsize
    shape = AttentionShape(**sizes, block_size=block_size, cache_bytes=itemsize, windowed=window is not None)
    assert attention_error(shape, BATCHES[batch], place, window) < 4e-3


def test_a_graph_is_replayed_for_other_batches() -> None:
    torch.manual_seed(0)
    shape = AttentionShape(**LLAMA_8B, block_size=64)
    replayed = ReplayedAttention(shape, [(20000, 1), (300, 1), (64, 1), (0, 1)], BF16)
    replayed.compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = replayed.compute()
    for batch in (replayed.spans, replayed.spans[:1], replayed.spans[1:], []):
        replayed.plan(batch)
        graph.replay()
        assert replayed.error(given, batch) <= 4e-3


def test_a_step_does_not_wait_for_the_device() -> None:
    shape = AttentionShape(**LLAMA_8B, block_size=64)
    planner = AttentionPlanner.on(CUDA, shape)
    spans, cache = filled_cache(shape, [(5000, 1), (3, 1)], BF16)
    projected = torch.randn(2, 48, 128, device="cuda").bfloat16()
    TritonAttention(cache, planner.metadata(spans), shape).attend(LayerAttention(0, 0.1), projected, None)
    with forbid_device_waits():
        attention = TritonAttention(cache, planner.metadata(spans), shape)
        attention.attend(LayerAttention(0, 0.1), projected, None)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("head_dim", "pairs"), [(64, 32), (80, 16), (128, 64), (256, 128)])
def test_kv_write(head_dim: int, pairs: int, cache_dtype: torch.dtype) -> None:
    from updraft.kernels.kv_cache.triton import launch_write_kv_

    torch.manual_seed(0)
    projected = torch.randn(300, 12, head_dim, device="cuda").bfloat16()
    angles = torch.rand(300, pairs, device="cuda") * 6
    weights = torch.randn(2, head_dim, device="cuda").bfloat16()
    rule = HeadTransform(HeadNorms(weights[0], weights[1], 1e-6), key_scale=0.5, value_scale=0.25)
    rotation = Rotation(angles.cos(), angles.sin())
    slots = torch.randperm(400, device="cuda")[:300].int()
    slots[::7] = -1
    cache = torch.zeros(25, 16, 4, head_dim, device="cuda").to(cache_dtype)
    expected, expected_cache = projected.clone(), cache.clone()
    write_kv_reference_(expected, expected_cache, slots, rule, rotation)
    launch_write_kv_(projected, cache, slots, rule, rotation)
    for mine, theirs in ((projected[:, :8], expected[:, :8]), (cache, expected_cache)):
        assert (mine.float() - theirs.float()).norm() < 4e-3 * theirs.float().norm()
