"""Embeddings: mean pooling of a prompt's hidden states, chunk by chunk."""

from __future__ import annotations

import torch
from torch import Tensor


class MeanPool:
    """The mean of a sequence's hidden states after the final norm, scaled to length 1.

    Only the float32 sum is kept, because scaling to length 1 cancels out the number of tokens.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, hidden: Tensor, start: int) -> None:
        """Add `hidden` (tokens, hidden_size) of the tokens from position `start`. Position 0 resets the sum."""
        total = hidden.to(torch.float32).sum(dim=0)
        self._sum = total if self._sum is None or start == 0 else self._sum + total

    def vector(self) -> Tensor:
        """Return the embedding (hidden_size,)."""
        assert self._sum is not None, "vector() called before add()"
        return torch.nn.functional.normalize(self._sum, dim=0)
