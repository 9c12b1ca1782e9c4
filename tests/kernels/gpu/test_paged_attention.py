"""On a GPU: bf16 and FP8 attention against float64, in eager mode and replayed from a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from updraft.kernels.attention import LayerAttention, QuerySpan
from updraft.kernels.attention_launch import AttentionShape
from updraft.kernels.attention_metadata import AttentionPlanner
from updraft.kernels.kv_write import HeadNorms, HeadRule, Rotation, write_kv_, write_kv_reference_
from updraft.kernels.triton_attention import CacheScales, TritonPagedAttention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LLAMA_8B = {"heads": 32, "kv_heads": 8, "head_dim": 128}
QWEN_05B = {"heads": 14, "kv_heads": 2, "head_dim": 64}
PHI = {"heads": 32, "kv_heads": 32, "head_dim": 80}
GEMMA = {"heads": 8, "kv_heads": 4, "head_dim": 256}
BATCHES = {
    "decode": [(5000, 1), (0, 1), (63, 1), (64, 1), (1023, 1)],
    "one long sequence": [(40000, 1)],
    "verification": [(3000, 8), (17, 5), (900, 1)],
    "prefill": [(0, 700), (1300, 257)],
    "mixed": [(9000, 1), (0, 300), (4000, 6), (0, 0), (15, 1)],
}


def layer_cache(shape: AttentionShape, blocks: int, dtype: torch.dtype) -> Tensor:
    """One layer, NaN: nothing may be read that was not written."""
    size = (1, blocks + 1, shape.block_size, 2 * shape.kv_heads, shape.head_dim)
    return torch.full(size, torch.nan, device="cuda").to(dtype)


def spans_and_cache(
    shape: AttentionShape, chunks: list[tuple[int, int]], dtype: torch.dtype
) -> tuple[list[QuerySpan], Tensor]:
    sizes = [-(-(start + length) // shape.block_size) for start, length in chunks]
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(0)).tolist()
    cache = layer_cache(shape, sum(sizes), dtype)
    spans: list[QuerySpan] = []
    for (start, length), size in zip(chunks, sizes, strict=True):
        table, order = order[:size], order[size:]
        spans.append(QuerySpan(start, length, table))
        tokens = torch.randn(start, 2 * shape.kv_heads, shape.head_dim, device="cuda").to(dtype)
        for index in range(0, start, shape.block_size):
            part = tokens[index : index + shape.block_size]
            cache[0, table[index // shape.block_size], : len(part)] = part
    return spans, cache


def exact(query: Tensor, cache: Tensor, spans: list[QuerySpan], layer: LayerAttention, scales: CacheScales) -> Tensor:
    """In float64, one sequence and KV head after the other."""
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    kv_heads = cache.shape[2] // 2
    shared = query.shape[1] // kv_heads
    row = 0
    for span in spans:
        rows, end = slice(row, row + span.length), span.start + span.length
        row += span.length
        tokens = cache[torch.tensor(span.block_table, dtype=torch.int64, device="cuda")].flatten(0, 1)[:end].double()
        positions = torch.arange(span.start, end, device="cuda")[:, None]
        keys = torch.arange(end, device="cuda")
        hidden = keys > positions
        if layer.window is not None:
            hidden |= keys <= positions - layer.window
        for head in range(query.shape[1]):
            key, value = tokens[:, head // shared] * scales.key, tokens[:, kv_heads + head // shared] * scales.value
            scores = query[rows, head].double() @ key.T * layer.scale
            out[rows, head] = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
    return out


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    ("sizes", "window", "fp8"),
    [(LLAMA_8B, None, False), (LLAMA_8B, 300, False), (LLAMA_8B, None, True), (QWEN_05B, None, False),
     (PHI, None, False), (GEMMA, 1000, False)],
)  # fmt: skip
def test_attention(sizes: dict[str, int], window: int | None, fp8: bool, block_size: int, batch: str) -> None:
    torch.manual_seed(0)
    shape = AttentionShape(**sizes, block_size=block_size, cache_bytes=1 if fp8 else 2)
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    spans, cache = spans_and_cache(shape, BATCHES[batch], dtype)
    rows = sum(span.length for span in spans)
    projected = torch.randn(rows + 3, shape.heads + 2 * shape.kv_heads, shape.head_dim, device="cuda").bfloat16()
    query, key_value = projected.split((shape.heads, 2 * shape.kv_heads), dim=1)
    layer, scales = LayerAttention(0, shape.head_dim**-0.5, window), CacheScales(0.5, 2.0) if fp8 else CacheScales()
    metadata = AttentionPlanner.on(torch.device("cuda"), shape).metadata(spans, rows + 3)
    attention = TritonPagedAttention(cache, metadata, shape, scales=scales if fp8 else None)
    given = attention.attend(layer, query, key_value)
    expected = exact(query, cache[0], spans, layer, scales)
    assert not given[rows:].any()
    assert (given - expected)[:rows].norm() < 4e-3 * expected[:rows].norm()


def test_a_graph_is_replayed_for_other_batches() -> None:
    torch.manual_seed(0)
    shape = AttentionShape(**LLAMA_8B, block_size=64)
    planner = AttentionPlanner.on(torch.device("cuda"), shape)
    spans, cache = spans_and_cache(shape, [(20000, 1), (300, 1), (64, 1), (0, 1)], torch.bfloat16)
    projected = torch.randn(8, 48, 128, device="cuda").bfloat16()
    query, key_value = projected.split((32, 16), dim=1)
    layer = LayerAttention(0, 128**-0.5)
    buffers = planner.graph_metadata(8, most_sequences=8, most_blocks=400)
    attention = TritonPagedAttention(cache, buffers.metadata, shape)
    attention.attend(layer, query, key_value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = attention.attend(layer, query, key_value)
    for batch in (spans, spans[:1], spans[1:], []):
        buffers.update_(batch)
        graph.replay()
        expected = exact(query, cache[0], batch, layer, CacheScales())
        assert not given[len(batch) :].any()
        assert (given - expected).norm() <= 4e-3 * expected.norm()


def test_a_step_does_not_wait_for_the_device() -> None:
    shape = AttentionShape(**LLAMA_8B, block_size=64)
    planner = AttentionPlanner.on(torch.device("cuda"), shape)
    spans, cache = spans_and_cache(shape, [(5000, 1), (3, 1)], torch.bfloat16)
    projected = torch.randn(2, 48, 128, device="cuda").bfloat16()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention = TritonPagedAttention(cache, planner.metadata(spans), shape)
        attention.attend(LayerAttention(0, 0.1), projected[:, :32], projected[:, 32:])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("head_dim", "pairs"), [(64, 32), (80, 16), (128, 64), (256, 128)])
def test_kv_write(head_dim: int, pairs: int, cache_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    projected = torch.randn(300, 12, head_dim, device="cuda").bfloat16()
    angles = torch.rand(300, pairs, device="cuda") * 6
    weights = torch.randn(2, head_dim, device="cuda").bfloat16()
    rule = HeadRule(HeadNorms(weights[0], weights[1], 1e-6), key_scale=0.5, value_scale=0.25)
    rotation = Rotation(angles.cos(), angles.sin())
    slots = torch.randperm(400, device="cuda")[:300].int()
    slots[::7] = -1
    cache = torch.zeros(25, 16, 4, head_dim, device="cuda").to(cache_dtype)
    expected, expected_cache = projected.clone(), cache.clone()
    write_kv_reference_(expected, expected_cache, slots, rule, rotation)
    write_kv_(projected, cache, slots, rule, rotation)
    for mine, theirs in ((projected[:, :8], expected[:, :8]), (cache, expected_cache)):
        assert (mine.float() - theirs.float()).norm() < 4e-3 * theirs.float().norm()
