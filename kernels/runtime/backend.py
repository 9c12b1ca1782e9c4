"""Choice of the implementation: Triton on a CUDA device, C on a CPU if it was built, else the torch reference.

Nothing here imports torch or triton at import time. Modules named `triton*.py` import triton; import them on first use.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .native_library import load

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BackendName = Literal["torch", "native", "triton"]
AttentionChoice = Literal["auto", "torch", "native", "triton"]
#: Data type of the KV cache; "auto" for that of the weights.
KVCacheDtype = Literal["auto", "fp8"]
#: Formats in which the engine can quantize the weights of linear layers.
Quantization = Literal["fp8", "int8", "int4"]


@functools.cache
def has_triton() -> bool:
    """Return whether triton is installed; does not import it."""
    return importlib.util.find_spec("triton") is not None


def kernel_cache() -> Path:
    """Return Triton's folder of compiled kernels, one subfolder per kernel and target; it may not exist yet."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    home = os.environ.get("TRITON_HOME")
    return Path(folder) if folder else (Path(home) if home else Path.home()) / ".triton" / "cache"


def uses_triton(tensor: Tensor) -> bool:
    """Return whether a kernel over `tensor` runs in Triton."""
    return tensor.is_cuda and has_triton()


def uses_native(rows: Tensor, *, multiple: int = 1) -> bool:
    """Return whether a kernel over `rows` (rows, size) runs in C. The size must be a multiple of `multiple`."""
    import torch

    return (
        rows.device.type == "cpu"
        and rows.dim() == 2
        and rows.dtype in (torch.float32, torch.bfloat16)
        and rows.shape[1] % multiple == 0
        and not (torch.is_grad_enabled() and rows.requires_grad)
        and load() is not None
    )


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the device's number of multiprocessors; without CUDA (interpreted kernels), that of an H200."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
