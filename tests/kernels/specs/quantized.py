"""Products with quantised weights as they are launched for bfloat16 and float16, from one token to many."""

from __future__ import annotations

from dataclasses import replace

from kernel_compiler import Spec
from updraft.kernels.linear.launch import inputs_per_step, matmul_launch
from updraft.kernels.linear.triton import byte_kernel, fp8_tokens_kernel, int4_kernel, reduce_kernel
from updraft.kernels.linear.types import SMALLEST_SCALE
from updraft.kernels.runtime.numeric import FP8_MAX

COUNTS = dict.fromkeys(
    ("num_tokens", "num_features", "num_steps", "token_stride", "group_stride", "split_steps", "group_steps"), "i32"
)
#: By warps: so few that 10, 3 and 1 programs share a multiprocessor.
REGISTERS = {2: 96, 4: 168, 8: 255}


def linear(kernel, weight: str, dtype: str, tokens: int, out: str, *, least: int = 80, **constants: int | bool) -> Spec:
    launch = matmul_launch(tokens)
    constants = {"HAS_ZERO": False, "HAS_MINIMUM": False, "FACTOR_GROUPS": 0} | constants
    stored = {"weight": "*i8", "packed": "*i16", "fp8": "*fp8e4nv"}[weight]
    scale = "*i8" if constants["FACTOR_GROUPS"] else "*fp16" if constants["HAS_MINIMUM"] else "*fp32"
    factor = "*fp16" if constants["FACTOR_GROUPS"] else scale
    types = {"hidden": dtype, weight.replace("fp8", "weight"): stored, "scale": scale}
    types |= {"zero": "*i8" if constants["HAS_ZERO"] else scale, "minimum": scale, "scale_factor": factor}
    types |= {"minimum_factor": factor, "input_sums": "*fp32" if constants["HAS_MINIMUM"] else scale, "out": out}
    pointers = tuple(types)
    return Spec(
        name=f"{kernel.__name__}-{weight}-{dtype[1:]}-{tokens}-{'-'.join(map(str, map(int, constants.values())))}",
        kernel=kernel,
        signature={**types, **COUNTS},
        constexprs={**launch.tiles, **constants},
        aligned=(*pointers, "num_features", "token_stride", "group_stride"),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        least=least,
        max_registers=REGISTERS[launch.num_warps],
    )


def int8(dtype: str, tokens: int, out: str, *, grouped: bool = False, zero: bool = False) -> Spec:
    step = 64 if grouped else inputs_per_step(4096, tokens)
    return linear(byte_kernel, "weight", dtype, tokens, out, GROUPED=grouped, HAS_ZERO=zero, BLOCK_INPUTS=step)


def gguf(tokens: int, step: int, *, minimum: bool = False, factor: int = 0) -> Spec:
    """Types of GGUF files: groups of 16 or 32 inputs in 8 or 4 bits."""
    terms = {"HAS_MINIMUM": minimum, "FACTOR_GROUPS": factor}
    if step == 64:
        spec = linear(int4_kernel, "packed", "*bf16", tokens, "*bf16", STEP=64, GROUPS=2, **terms)
        return spec if tokens == 1 else replace(spec, max_registers=255)  # two programs share a multiprocessor
    return linear(byte_kernel, "weight", "*bf16", tokens, "*bf16", GROUPED=True, BLOCK_INPUTS=step, **terms)


def fp8(tokens: int) -> Spec:
    constants = {"GROUPED": True, "HAS_ZERO": False, "BLOCK_INPUTS": 64}
    return linear(byte_kernel, "fp8", "*bf16", tokens, "*bf16", least=90, **constants)


def int4(dtype: str, tokens: int, out: str, *, step: int = 128, groups: int = 1, zero: bool = False) -> Spec:
    return linear(int4_kernel, "packed", dtype, tokens, out, STEP=step, GROUPS=groups, HAS_ZERO=zero)


SPECS = [
    *(int8("*bf16", tokens, "*bf16") for tokens in (1, 64, 512)),
    int8("*fp16", 1, "*fp32"),
    *(int8("*bf16", tokens, "*bf16", grouped=True, zero=True) for tokens in (1, 64, 512)),
    *(fp8(tokens) for tokens in (1, 64, 512)),
    *(int4("*bf16", tokens, "*bf16") for tokens in (1, 64, 512)),
    int4("*fp16", 1, "*fp32", step=64),
    replace(int4("*bf16", 1, "*bf16", zero=True), max_spilled={100: 8}),  # two registers, of 72 for ten programs
    *(int4("*bf16", tokens, "*bf16", zero=True) for tokens in (64, 512)),
    *(int4("*bf16", tokens, "*bf16", step=64, groups=2, zero=True) for tokens in (1, 64, 512)),
    *(gguf(tokens, 64, minimum=True) for tokens in (1, 64)),  # Q4_1
    *(gguf(tokens, 64, minimum=True, factor=8) for tokens in (1, 64)),  # Q4_K
    *(gguf(tokens, 32, minimum=True, factor=8) for tokens in (1, 64, 512)),  # Q5_K
    *(gguf(tokens, 16, factor=16) for tokens in (1, 64, 512)),  # Q6_K
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
