"""Which implementation computes: Triton on a CUDA device, the plain torch reference everywhere else.

Nothing here imports triton. The modules that do are named `<kernel>_triton.py`, and are imported when they are used.
"""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor


@functools.cache
def has_triton() -> bool:
    """Whether triton is installed; does not import it."""
    return importlib.util.find_spec("triton") is not None


def uses_triton(tensor: Tensor) -> bool:
    """Whether a kernel over `tensor` runs in Triton."""
    return tensor.is_cuda and has_triton()
