"""Specialisations of `paged_attention_triton` that must compile: decode, verification and prefill of common shapes."""

from __future__ import annotations

from dataclasses import replace

from kernel_compiler import Spec
from updraft.kernels.attention_launch import AttentionShape, attention_launch
from updraft.kernels.paged_attention_triton import attend_kernel, merge_kernel

#: With these, a multiprocessor holds the three programs of a decode that `programs_at_once` counts on. Of heads of 256
#: its shared memory holds two.
REGISTERS_FOR_THREE = 168


def attend(
    name: str, shape: AttentionShape, queries: int, *, dtype: str = "bf16", spilled: int = 0, **rules: bool
) -> Spec:
    """`spilled`: bytes on sm_80 at most."""
    windowed = rules.get("windowed", False)
    launch = attention_launch(replace(shape, windowed=windowed), queries, "none")
    cache = "fp8e4nv" if shape.cache_bytes == 1 else dtype
    pointers = {"out": dtype, "partial": "fp32", "partial_weight": "fp32", "query": dtype, "cache": cache}
    pointers |= {"work": "i32", "blocks": "i32"}
    signature = {pointer: f"*{element}" for pointer, element in pointers.items()}
    signature |= dict.fromkeys(("query_stride", "token_stride", "window"), "i32")
    signature |= dict.fromkeys(("score_scale", "value_scale", "soft_cap"), "fp32")
    constexprs = {
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "PADDED_DIM": shape.padded_dim,
        "BLOCK_SIZE": shape.block_size,
        "WINDOWED": windowed,
        "CAPPED": rules.get("capped", False),
        "PEELED": launch.tiles["BLOCK_M"] >= 64,
        **launch.tiles,
    }
    return Spec(
        name,
        attend_kernel,
        signature,
        constexprs,
        aligned=("out", "partial", "partial_weight", "query", "cache", "work", "query_stride", "token_stride"),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        least=90 if shape.cache_bytes == 1 else 80,
        max_registers=REGISTERS_FOR_THREE if launch.tiles["BLOCK_M"] < 64 and shape.head_dim < 256 else 255,
        max_spilled={80: spilled},
    )


LLAMA_8B = AttentionShape(heads=32, kv_heads=8, head_dim=128, block_size=64)
QWEN_05B = AttentionShape(heads=14, kv_heads=2, head_dim=64, block_size=64)
SMALL_BLOCKS = AttentionShape(heads=32, kv_heads=8, head_dim=128, block_size=16)
FP8 = AttentionShape(heads=32, kv_heads=8, head_dim=128, block_size=64, cache_bytes=1)
EIGHT_SHARE = AttentionShape(heads=64, kv_heads=8, head_dim=128, block_size=64)
UNEVEN = AttentionShape(heads=32, kv_heads=32, head_dim=80, block_size=64)
WIDE = AttentionShape(heads=8, kv_heads=4, head_dim=256, block_size=64)
PHI = AttentionShape(heads=32, kv_heads=32, head_dim=96, block_size=16)
FLOAT32 = AttentionShape(heads=32, kv_heads=8, head_dim=128, block_size=16, cache_bytes=4)

SPECS = [
    attend("decode-8b", LLAMA_8B, 1),
    attend("decode-0.5b", QWEN_05B, 1),
    attend("decode-block16", SMALL_BLOCKS, 1),
    attend("decode-fp8", FP8, 1),
    attend("decode-gemma", WIDE, 1, windowed=True, capped=True),
    attend("verify-8b", LLAMA_8B, 8),
    attend("verify-0.5b", QWEN_05B, 8),
    attend("verify-70b", EIGHT_SHARE, 8),
    attend("decode-uneven", UNEVEN, 1),
    attend("prefill-uneven", UNEVEN, 2048),
    attend("prefill-8b", LLAMA_8B, 2048),
    attend("prefill-0.5b", QWEN_05B, 2048, dtype="fp16"),
    attend("prefill-block16", SMALL_BLOCKS, 2048),
    attend("decode-windowed", SMALL_BLOCKS, 1, windowed=True),
    attend("verify9-8b", SMALL_BLOCKS, 9),
    attend("verify9-windowed", SMALL_BLOCKS, 9, windowed=True),
    attend("verify9-0.5b", QWEN_05B, 9),
    attend("prefill-windowed", LLAMA_8B, 2048, windowed=True, spilled=32),
    attend("decode-phi", PHI, 1),
    attend("verify9-phi", PHI, 9),
    attend("prefill-phi", PHI, 2048),
    attend("prefill-phi-windowed", PHI, 2048, windowed=True, spilled=8),
    attend("decode-fp32", FLOAT32, 1, dtype="fp32"),
    attend("verify9-fp32", FLOAT32, 9, dtype="fp32"),
    attend("prefill-fp32", FLOAT32, 2048, dtype="fp32"),
    attend("prefill-fp32-windowed", FLOAT32, 2048, dtype="fp32", windowed=True),
    attend("decode-gemma-plain", WIDE, 1),
    attend("verify9-gemma", WIDE, 9, windowed=True),
    attend("prefill-fp8", FP8, 2048),
    attend("prefill-gemma", WIDE, 2048, windowed=True, capped=True),
    Spec(
        "merge",
        merge_kernel,
        {"out": "*bf16", "partial": "*fp32", "partial_weight": "*fp32", "merges": "*i32"},
        {"HEAD_DIM": 128, "PADDED_DIM": 128, "AT_ONCE": 16},
        aligned=("out", "partial", "partial_weight", "merges"),
        max_registers=64,
    ),
]
