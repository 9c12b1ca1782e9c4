"""FP8 activations in plain torch: what the kernel that quantises tokens is checked against."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional
from updraft.kernels.linear.types import ALIGNMENT, FP8, SMALLEST_SCALE
from updraft.kernels.runtime.numeric import FP8_MAX


def quantize_tokens_reference(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """`hidden` (tokens, inputs) as FP8, its inputs padded to a multiple of 16, and a float32 scale for each token."""
    wide = hidden.float()
    scale = wide.abs().amax(dim=1).clamp(min=SMALLEST_SCALE) / FP8_MAX
    data = functional.pad(wide / scale[:, None], (0, -hidden.shape[1] % ALIGNMENT))
    return data.clamp(-FP8_MAX, FP8_MAX).to(FP8), scale
