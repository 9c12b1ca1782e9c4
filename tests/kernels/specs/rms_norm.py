"""RMSNorm as models with rows from 1024 to 8192 and heads of 64 to 256 launch it."""

from kernel_compiler import Spec
from updraft.kernels.norm.triton import qk_norm_kernel, rms_norm_kernel
from updraft.kernels.runtime.launch import row_launch

#: At 64 eight programs of 128 threads share a multiprocessor, at 96 five: more bytes under way than bandwidth asks for.
_REGISTERS = {"bf16": 64, "fp16": 64, "fp32": 96}


def _rows(size: int, dtype: str, *, residual: bool, unit_offset: bool) -> Spec:
    launch = row_launch(size)
    pointers = dict.fromkeys(("hidden", "weight", "out", *(["residual"] if residual else [])), f"*{dtype}")
    integers = dict.fromkeys(("num_rows", "size", "hidden_stride", "residual_stride"), "i32")
    aligned = (*pointers, "size", "hidden_stride", "residual_stride")
    flags = {"HAS_RESIDUAL": residual, "UNIT_OFFSET": unit_offset, **({} if residual else {"residual": None})}
    return Spec(
        f"rows-{size}-{dtype}-{residual=}-{unit_offset=}",
        rms_norm_kernel,
        {**pointers, **integers, "eps": "fp32"},
        {**flags, **launch.tiles},
        aligned,
        num_warps=launch.num_warps,
        max_registers=_REGISTERS[dtype],
    )


def _heads(size: int, *, unit_offset: bool) -> Spec:
    launch = row_launch(size)
    pointers = dict.fromkeys(("heads", "query_weight", "key_weight"), "*bf16")
    names = ("num_tokens", "num_heads", "num_query_heads", "size", "token_stride", "head_stride")
    return Spec(
        f"heads-{size}-{unit_offset=}",
        qk_norm_kernel,
        {**pointers, **dict.fromkeys(names, "i32"), "eps": "fp32"},
        {"UNIT_OFFSET": unit_offset, **launch.tiles},
        (*pointers, "size", "token_stride", "head_stride"),
        num_warps=launch.num_warps,
        max_registers=_REGISTERS["bf16"],
    )


SPECS = [
    _rows(896, "bf16", residual=True, unit_offset=False),
    _rows(1152, "bf16", residual=False, unit_offset=True),
    _rows(4096, "fp16", residual=True, unit_offset=False),
    _rows(4096, "fp32", residual=True, unit_offset=False),
    _rows(8192, "bf16", residual=True, unit_offset=False),
    _heads(64, unit_offset=False),
    _heads(128, unit_offset=False),
    _heads(256, unit_offset=True),
]
