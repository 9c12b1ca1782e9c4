"""Typical-p (Meister et al. 2023), in plain torch only: what it keeps lies anywhere in the order of a row's tokens, and
no threshold says that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...protocol.sampling import LEAST_TEMPERATURE
from .reference import ranks


def typical_logits(logits: Tensor, temperatures: Tensor, typical_p: Tensor) -> Tensor:
    """`logits` (rows, vocab) float32, -inf for tokens beyond the `typical_p` mass of those whose surprise is nearest
    to the distribution's entropy, of equally near ones the likeliest first. `temperatures` and `typical_p` (rows,)
    float64; greedy rows and those with a share of 1 stay as they are.
    """
    random = temperatures >= LEAST_TEMPERATURE
    order = ranks(logits).argsort(dim=-1, descending=True)
    scaled = logits.gather(1, order).double() / torch.where(random, temperatures, 1.0)[:, None]
    logprobs = scaled.log_softmax(dim=-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs).nan_to_num(0.0).sum(dim=-1, keepdim=True)
    nearest = (logprobs + entropy).abs().argsort(dim=-1, stable=True)
    mass = probabilities.gather(1, nearest)
    beyond = mass.cumsum(dim=-1) - mass >= torch.where(random & (typical_p < 1), typical_p, 2.0)[:, None]
    beyond[:, 0] = False
    return logits.masked_fill(torch.zeros_like(beyond).scatter(1, order.gather(1, nearest), beyond), -torch.inf)
