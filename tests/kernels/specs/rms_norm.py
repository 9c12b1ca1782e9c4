"""RMSNorm as models with rows from 1024 to 8192 launch it."""

from kernel_compiler import Spec
from updraft.kernels.norm.triton import rms_norm_kernel
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


SPECS = [
    _rows(896, "bf16", residual=True, unit_offset=False),
    _rows(1152, "bf16", residual=False, unit_offset=True),
    _rows(4096, "fp16", residual=True, unit_offset=False),
    _rows(4096, "fp32", residual=True, unit_offset=False),
    _rows(8192, "bf16", residual=True, unit_offset=False),
]
