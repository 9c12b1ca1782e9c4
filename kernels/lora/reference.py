"""Low-rank adapters in plain torch: the reference for the kernels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .types import NO_ADAPTER, LoraWeights


def add_lora_reference(out: Tensor, hidden: Tensor, weights: LoraWeights, adapters: npt.NDArray[np.int32]) -> None:
    """Compute `ops.add_lora` for one adapter after the other. `adapters`: adapter of each row."""
    for adapter in np.unique(adapters[adapters != NO_ADAPTER]).tolist():
        rows = torch.from_numpy(np.flatnonzero(adapters == adapter)).to(hidden.device)
        low = (hidden[rows].float() @ weights.down[adapter].float().T).to(hidden.dtype)
        out[rows] = (out[rows].float() + low.float() @ weights.up[adapter].float().T).to(out.dtype)
