"""Gated activations in the dtypes that models are served in."""

from kernel_compiler import Spec
from updraft.kernels.activation.triton import gated_activation_kernel, gated_activation_launch


def _gated(activation: str, dtype: str, size: int) -> Spec:
    launch = gated_activation_launch(size)
    return Spec(
        f"{activation}-{dtype}-{size}",
        gated_activation_kernel,
        {"gate_up": f"*{dtype}", "out": f"*{dtype}", "size": "i32", "row_stride": "i32"},
        {"ACTIVATION": activation, **launch.tiles},
        ("gate_up", "out", "size", "row_stride"),
        num_warps=launch.num_warps,
        max_registers=64,  # eight programs of 128 threads on a multiprocessor
    )


SPECS = [
    _gated("silu", "bf16", 14336),
    _gated("silu", "fp16", 1280),
    _gated("gelu_tanh", "bf16", 6912),
    _gated("swigluoai", "bf16", 2880),
    _gated("gelu_tanh", "fp32", 6912),
]
