"""RMSNorm in plain torch: the reference for the kernels.

Zhang & Sennrich 2019: x / sqrt(mean(x^2) + eps) * weight, with the root mean square in float32. Two conventions exist
for the weight. Llama rounds x to its dtype before the product. Gemma stores weights minus one and rounds after the
product, which is computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .types import Norm


def rms_norm_reference(hidden: Tensor, norm: Norm) -> Tensor:
    """Return `hidden` normalised over its last dimension."""
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.unit_offset:
        return (normed * (1.0 + norm.weight.float())).to(hidden.dtype)
    return normed.to(hidden.dtype) * norm.weight
