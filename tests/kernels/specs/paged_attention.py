"""Specialisations of `paged_attention_triton` that must compile: decode, verification and prefill of common shapes.

Nine queries are eight drafts and the token before them. Models without grouped heads (Phi-3) use the same rows for
nine queries as for one, and float32 the same as for a prompt, so that these specialisations occur once. `SOAK_SPECS`
are further shapes of kinds that `SPECS` has.
"""

from __future__ import annotations

from dataclasses import replace

from kernel_compiler import Spec
from updraft.kernels.attention.launch import AttentionShape, attention_launch, programs_at_once
from updraft.kernels.attention.triton import attend_kernel, merge_kernel
from updraft.kernels.runtime.launch import Launch

REGISTERS_OF_MULTIPROCESSOR = 65536
REGISTERS_OF_THREAD = 255


def attend(
    name: str, shape: AttentionShape, queries: int, *, dtype: str = "bf16", registers: int | None = None, **rules: bool
) -> Spec:
    """`registers`: where fewer programs fit than the planner counts on."""
    launch = attention_launch(shape, queries)
    cache = "fp8e4nv" if shape.cache_bytes == 1 else dtype
    pointers = {"out": dtype, "partial": "fp32", "partial_lse": "fp32", "query": dtype, "cache": cache}
    pointers |= {"work": "i32", "blocks": "i32", "sinks": "fp32"}
    signature = {pointer: f"*{element}" for pointer, element in pointers.items()}
    signature |= dict.fromkeys(("query_stride", "token_stride", "window"), "i32")
    signature |= dict.fromkeys(("score_scale", "value_scale"), "fp32")
    constexprs = {
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "PADDED_DIM": shape.padded_dim,
        "BLOCK_SIZE": shape.block_size,
        "WINDOWED": rules.get("windowed", False),
        "PEELED": launch.tiles["BLOCK_M"] >= 64,
        "HAS_SINKS": rules.get("sinks", False),
        **launch.tiles,
    }
    return Spec(
        name,
        attend_kernel,
        signature,
        constexprs,
        aligned=("out", "partial", "partial_lse", "query", "cache", "work", "query_stride", "token_stride"),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        least=90 if shape.cache_bytes == 1 else 80,
        max_registers=registers or most_registers(shape, launch),
        programs=programs_at_once(shape, launch, 1),
    )


def most_registers(shape: AttentionShape, launch: Launch) -> int:
    """Of a thread, so that a multiprocessor holds the programs of a decode that `programs_at_once` counts on."""
    if launch.tiles["BLOCK_M"] >= 64:
        return REGISTERS_OF_THREAD
    threads = 32 * launch.num_warps * programs_at_once(shape, launch, 1)
    return min(REGISTERS_OF_MULTIPROCESSOR // threads // 8 * 8, REGISTERS_OF_THREAD)


def with_window(shape: AttentionShape) -> AttentionShape:
    return replace(shape, windowed=True)


def in_float32(shape: AttentionShape) -> AttentionShape:
    return replace(shape, cache_bytes=4)


def in_fp8(shape: AttentionShape) -> AttentionShape:
    return replace(shape, cache_bytes=1)


def merge(head_dim: int, dtype: str = "bf16") -> Spec:
    padded = 1 << (head_dim - 1).bit_length()
    return Spec(
        f"merge-{dtype}-{head_dim}",
        merge_kernel,
        {"out": f"*{dtype}", "partial": "*fp32", "partial_lse": "*fp32", "merges": "*i32", "sinks": "*fp32"},
        {"HEAD_DIM": head_dim, "PADDED_DIM": padded, "BLOCK_SPLITS": 16, "HAS_SINKS": head_dim == 64},
        aligned=("out", "partial", "partial_lse", "merges"),
        max_registers=64 if padded <= 128 else 80,
    )


LLAMA_8B = AttentionShape(heads=32, kv_heads=8, head_dim=128, block_size=64)
QWEN_05B = AttentionShape(heads=14, kv_heads=2, head_dim=64, block_size=64)
SMALL_BLOCKS = AttentionShape(heads=32, kv_heads=8, head_dim=128, block_size=16)
EIGHT_SHARE = AttentionShape(heads=64, kv_heads=8, head_dim=128, block_size=64)
UNEVEN = AttentionShape(heads=32, kv_heads=32, head_dim=80, block_size=64)
MISTRAL = with_window(LLAMA_8B)
PHI_3 = with_window(AttentionShape(heads=32, kv_heads=32, head_dim=96, block_size=64))
GPT_OSS = with_window(AttentionShape(heads=64, kv_heads=8, head_dim=64, block_size=64))
GEMMA_1B = with_window(AttentionShape(heads=4, kv_heads=1, head_dim=256, block_size=64))
GEMMA_4B = with_window(AttentionShape(heads=8, kv_heads=4, head_dim=256, block_size=64))

GROUPED = [
    attend("decode-8b", LLAMA_8B, 1),
    attend("decode-0.5b", QWEN_05B, 1),
    attend("decode-block16", SMALL_BLOCKS, 1),
    attend("decode-uneven", UNEVEN, 1),
    attend("verify-8b", LLAMA_8B, 8),
    attend("verify-0.5b", QWEN_05B, 9),
    attend("verify-70b", EIGHT_SHARE, 8),
    attend("verify-block16", SMALL_BLOCKS, 8),
    attend("nine-8b", LLAMA_8B, 9),
    attend("nine-70b", EIGHT_SHARE, 9),
    attend("nine-block16", SMALL_BLOCKS, 9),
    attend("prefill-uneven", UNEVEN, 2048),
    attend("prefill-8b", LLAMA_8B, 2048),
    attend("prefill-0.5b", QWEN_05B, 2048, dtype="fp16"),
    attend("prefill-block16", SMALL_BLOCKS, 2048),
]
#: Every layer has a window (Mistral), or some have (Gemma 3): the others are launched alike.
WINDOWED = [
    attend("decode-windowed", MISTRAL, 1, windowed=True),
    attend("verify-windowed", MISTRAL, 8, windowed=True),
    attend("nine-windowed", MISTRAL, 9, windowed=True),
    attend("nine-full-layer", MISTRAL, 9),
    attend("nine-windowed-block16", with_window(SMALL_BLOCKS), 9, windowed=True),
    attend("prefill-windowed", MISTRAL, 2048, windowed=True),
    attend("decode-gpt-oss", GPT_OSS, 1, windowed=True, sinks=True),
    attend("nine-gpt-oss-full", GPT_OSS, 9, sinks=True),
    attend("prefill-gpt-oss", GPT_OSS, 2048, windowed=True, sinks=True),
    attend("decode-phi", PHI_3, 9, windowed=True),
    attend("prefill-phi", PHI_3, 2048, windowed=True),
    attend("prefill-phi-full", replace(PHI_3, windowed=False), 2048),
    attend("decode-gemma3", GEMMA_4B, 1, windowed=True),
    attend("nine-gemma3", GEMMA_4B, 9, windowed=True),
    attend("nine-gemma3-full", GEMMA_4B, 9),
    attend("nine-gemma3-1b", GEMMA_1B, 9, windowed=True),
    attend("prefill-gemma3", GEMMA_4B, 2048, windowed=True),
    attend("prefill-gemma3-full", GEMMA_4B, 2048),
]
FLOAT32 = [
    attend("float32-decode", in_float32(LLAMA_8B), 1, dtype="fp32"),
    attend("float32-decode-block16", in_float32(SMALL_BLOCKS), 1, dtype="fp32"),
    attend("float32-decode-phi", in_float32(PHI_3), 9, dtype="fp32", windowed=True),
    attend("float32-decode-gemma", in_float32(GEMMA_4B), 1, dtype="fp32", windowed=True),
    attend("float32-nine", in_float32(LLAMA_8B), 9, dtype="fp32"),
    attend("float32-nine-windowed", in_float32(MISTRAL), 9, dtype="fp32", windowed=True),
    attend("float32-nine-block16", in_float32(SMALL_BLOCKS), 9, dtype="fp32"),
    attend("float32-nine-0.5b", in_float32(QWEN_05B), 9, dtype="fp32"),
    attend("float32-nine-gemma", in_float32(GEMMA_4B), 9, dtype="fp32", windowed=True),
    attend("float32-prefill-phi", in_float32(PHI_3), 2048, dtype="fp32", windowed=True),
]
FP8 = [
    replace(attend("fp8-decode", in_fp8(LLAMA_8B), 1), max_spilled={100: 8}),  # the price of a third program
    attend("fp8-nine-windowed", in_fp8(MISTRAL), 9, windowed=True),
    attend("fp8-prefill", in_fp8(LLAMA_8B), 2048),
    attend("fp8-prefill-windowed", in_fp8(MISTRAL), 2048, windowed=True),
    attend("fp8-decode-gemma", in_fp8(GEMMA_4B), 1, windowed=True, registers=248),
    attend("fp8-nine-gemma", in_fp8(GEMMA_4B), 9, windowed=True, registers=232),
    attend("fp8-prefill-gemma", in_fp8(GEMMA_4B), 2048, windowed=True),
]
ALL = [*GROUPED, *WINDOWED, *FLOAT32, *FP8, merge(64), merge(96), merge(128), merge(256), merge(128, "fp32")]
FURTHER = {
    *("decode-block16", "verify-0.5b", "verify-70b", "verify-block16", "nine-70b", "prefill-block16"),
    *("verify-windowed", "nine-full-layer", "nine-windowed-block16", "prefill-phi-full", "nine-gemma3-full"),
    *("nine-gemma3-1b", "prefill-gemma3-full", "float32-decode-block16", "float32-decode-gemma", "float32-nine-0.5b"),
    *("float32-nine-windowed", "float32-nine-block16", "fp8-decode-gemma", "fp8-prefill-windowed"),
}
SPECS = [spec for spec in ALL if spec.name not in FURTHER]
SOAK_SPECS = [spec for spec in ALL if spec.name in FURTHER]
