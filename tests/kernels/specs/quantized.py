"""Products with quantised weights as they are launched for bfloat16 and float16, from one token to many."""

from __future__ import annotations

from kernel_compiler import Spec
from updraft.kernels.linear.launch import inputs_per_step, matmul_launch
from updraft.kernels.linear.triton import fp8_tokens_kernel, int4_kernel, int8_kernel, reduce_kernel
from updraft.kernels.linear.types import SMALLEST_SCALE
from updraft.kernels.runtime.numeric import FP8_MAX

COUNTS = dict.fromkeys(("num_tokens", "num_features", "num_steps", "token_stride", "split_steps"), "i32")
#: By warps: so few that 10, 3 and 1 programs share a multiprocessor.
REGISTERS = {2: 96, 4: 160, 8: 255}


def linear(kernel, weight: str, dtype: str, tokens: int, out: str, **constants: int) -> Spec:
    launch = matmul_launch(tokens)
    pointers = ("hidden", weight, "scale", "out")
    types = {"hidden": dtype, weight: "*i8" if weight == "weight" else "*i16", "scale": "*fp32", "out": out}
    return Spec(
        name=f"{kernel.__name__}-{dtype[1:]}-{tokens}-{'-'.join(map(str, constants.values()))}",
        kernel=kernel,
        signature={**types, **COUNTS},
        constexprs={**launch.tiles, **constants},
        aligned=(*pointers, "num_features", "token_stride"),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        max_registers=REGISTERS[launch.num_warps],
    )


def int8(dtype: str, tokens: int, out: str) -> Spec:
    return linear(int8_kernel, "weight", dtype, tokens, out, BLOCK_INPUTS=inputs_per_step(4096, tokens))


SPECS = [
    *(int8("*bf16", tokens, "*bf16") for tokens in (1, 64, 512)),
    int8("*fp16", 1, "*fp32"),
    *(linear(int4_kernel, "packed", "*bf16", tokens, "*bf16", GROUP=128) for tokens in (1, 64, 512)),
    linear(int4_kernel, "packed", "*fp16", 1, "*fp32", GROUP=64),
    Spec(
        name="reduce",
        kernel=reduce_kernel,
        signature={"parts": "*fp32", "out": "*bf16", "size": "i32", "num_splits": "i32"},
        constexprs={"BLOCK": 1024},
        aligned=("parts", "out", "size"),
        max_registers=64,
    ),
    Spec(
        name="fp8_tokens",
        kernel=fp8_tokens_kernel,
        signature={
            "hidden": "*bf16", "out": "*fp8e4nv", "scale": "*fp32",
            **dict.fromkeys(("num_inputs", "token_stride", "out_stride"), "i32"),
        },
        constexprs={"SMALLEST": SMALLEST_SCALE, "MAXIMUM": FP8_MAX, "BLOCK": 4096},
        aligned=("hidden", "out", "num_inputs", "token_stride", "out_stride"),
        num_warps=8,
        least=90,
        max_registers=64,
    ),
]  # fmt: skip
