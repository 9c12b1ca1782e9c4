"""Specialisations of `kv_write_triton` that must compile: with and without norms, rotation and FP8."""

from __future__ import annotations

from kernel_compiler import Spec
from updraft.kernels.kv_cache.triton import write_kv_kernel


def write(name: str, head_dim: int, *, pairs: int | None = None, cache: str = "bf16", **flags: bool) -> Spec:
    half = pairs or head_dim // 2
    padded_rest = 1 << (head_dim - 2 * half - 1).bit_length() if 2 * half < head_dim else 0
    signature = dict.fromkeys(("projected", "query_norm", "key_norm"), "*bf16")
    signature |= {"cache": f"*{cache}", "slots": "*i32", "cosine": "*fp32", "sine": "*fp32"}
    signature |= dict.fromkeys(("row_stride", "heads", "kv_heads"), "i32")
    signature |= dict.fromkeys(("eps", "key_factor", "value_factor"), "fp32")
    constexprs = {
        "HEAD_DIM": head_dim,
        "PAIRS": half,
        "PADDED_PAIRS": 1 << (half - 1).bit_length(),
        "PADDED_REST": padded_rest,
        "BLOCK_HEADS": 1024 // (1 << (head_dim - 1).bit_length()),
        "ROTATED": flags.get("rotated", True),
        "NORMED": flags.get("normed", False),
        "UNIT_OFFSET": flags.get("unit_offset", False),
        "LARGEST": 448.0 if cache == "fp8e4nv" else 0.0,
    }
    pointers = ("projected", "cache", "slots", "cosine", "sine", "query_norm", "key_norm", "row_stride")
    return Spec(
        name,
        write_kv_kernel,
        signature,
        constexprs,
        aligned=pointers,
        least=90 if cache == "fp8e4nv" else 80,
        max_registers=64,
    )


SPECS = [
    write("plain", 128, rotated=False),
    write("rotated", 128),
    write("rotated-64", 64),
    write("partly-rotated-80", 80, pairs=16),
    write("normed", 128, normed=True),
    write("gemma", 256, normed=True, unit_offset=True),
    write("fp8", 128, normed=True, cache="fp8e4nv"),
]
