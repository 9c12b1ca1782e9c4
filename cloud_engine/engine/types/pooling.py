"""Embeddings: the hidden states of a whole prompt, gathered chunk by chunk into one vector."""

# torch leaves `Tensor.tolist` untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import torch
from torch import Tensor


class MeanPool:
    """The mean of a sequence's hidden states after the final norm, scaled to length 1.

    Scaling makes the number of tokens cancel out, so the sum is all that has to be kept, in float32.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, hidden: Tensor, start: int) -> None:
        """Take in `hidden` (tokens, hidden_size), the first at position `start`. From 0 on everything begins anew."""
        total = hidden.to(torch.float32).sum(dim=0)
        self._sum = total if self._sum is None or start == 0 else self._sum + total

    def vector(self) -> list[float]:
        """(hidden_size,). Waits for the device."""
        assert self._sum is not None, "pooled before anything was computed"
        return torch.nn.functional.normalize(self._sum, dim=0).tolist()
