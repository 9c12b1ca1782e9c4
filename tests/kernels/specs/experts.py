"""Products with experts as they are launched for Qwen3-30B-A3B, Mixtral and gpt-oss, from one row to a long prompt."""

from __future__ import annotations

from kernel_compiler import Spec
from updraft.kernels.experts.launch import expert_launch
from updraft.kernels.experts.triton import expert_kernel

#: By warps, as for quantised weights.
REGISTERS = {2: 128, 4: 168, 8: 255}


def product(name: str, pairs: int, shape: tuple[int, int, int], dtype: str = "bf16", **rules: bool) -> Spec:
    """`shape`: experts, inputs, and bytes of an element."""
    experts, inputs, size = shape
    launch = expert_launch(pairs, experts, inputs, size)
    pointers = dict.fromkeys(("hidden", "weight", "bias", "out"), f"*{dtype}") | {"rows": "*i64", "starts": "*i64"}
    counts = dict.fromkeys(("num_experts", "num_features", "num_inputs", "row_stride"), "i32")
    rules = {"GATHERED": True, "HAS_BIAS": False, **rules}
    return Spec(
        f"{name}-{dtype}-{pairs}",
        expert_kernel,
        {**pointers, **counts},
        {**launch.tiles, **rules, "EVEN": inputs % launch.tiles["BLOCK_INPUTS"] == 0, "EXPERTS": experts},
        aligned=(*pointers, "num_features", "num_inputs", "row_stride"),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        max_registers=REGISTERS[launch.num_warps],
    )


SPECS = [
    *(product("qwen3-up", pairs, (128, 2048, 2)) for pairs in (8, 8 * 512, 8 * 2048)),
    product("qwen3-down", 8, (128, 768, 2), GATHERED=False),
    *(product("gpt-oss", pairs, (32, 2880, 2), HAS_BIAS=True) for pairs in (4, 4 * 256, 4 * 2048)),
    product("mixtral", 2, (8, 4096, 2), "fp16"),
    product("uneven", 64, (8, 100, 2)),
    product("float32", 64, (8, 2048, 4), "fp32"),
]
