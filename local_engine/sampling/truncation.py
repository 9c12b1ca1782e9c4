"""Token truncation: top-k, top-p, min-p and typical-p over one row, without sorting a large vocabulary.

Follows `protocol.sampling.SamplingParams`: the filters apply in this order, each to the tokens left by the previous
one, in double precision. Equally likely tokens are ordered by id. At least one token always stays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...protocol.sampling import ResolvedParams
from .gumbel_noise import Doubles, Floats, Indices, blocks

_HEADS = (256, 4096)  # examine the 256 likeliest tokens first, then 4,096, then all
_GROUPS = 64


def survivors(logits: Floats, params: ResolvedParams, temperature: float) -> Indices:
    """Return the indices of the tokens that pass all filters, ascending. `logits` (n,): at least one must be finite."""
    head, probabilities = _head(logits, params, temperature)
    inside = _inside(probabilities, params)
    head = head[inside]
    if params.typical_p < 1:
        head = head[_typical(logits[head].astype(np.float64) / temperature, params.typical_p)]
    head.sort()
    return head


def largest(logits: Floats, count: int) -> Indices:
    """Return the indices of the `count` largest logits, largest first; equal logits keep their order."""
    size, width = len(logits), len(logits) // _GROUPS
    count = min(count, size)
    if count == 0:
        return np.empty(0, np.intp)
    if count <= width // 2:
        # The largest logits lie in the columns with the largest maxima, so the sort needs only these columns.
        maxima = logits[: width * _GROUPS].reshape(_GROUPS, width).max(axis=0)
        bound = np.partition(maxima, width - count)[width - count]
        inside = (width * np.arange(_GROUPS)[:, None] + np.flatnonzero(maxima >= bound)).ravel()
        candidates = np.concatenate((inside, np.arange(width * _GROUPS, size)))
        candidates = candidates[logits[candidates] >= bound]
    else:
        candidates = np.flatnonzero(logits >= np.partition(logits, size - count)[size - count])
    return candidates[np.argsort(-logits[candidates], kind="stable")[:count]]


def _head(logits: Floats, params: ResolvedParams, temperature: float) -> tuple[Indices, Doubles]:
    """Return the likeliest tokens and their probabilities: the top k, or as many as top-p and min-p need."""
    size = len(logits)
    if 0 < params.top_k < size:
        head = largest(logits, params.top_k)
        weights = _weights(logits[head], float(logits[head[0]]), temperature)
        return head, weights / weights.sum()
    highest = float(logits.max())
    total = sum(_weights(logits[block], highest, temperature).sum() for block in blocks(size))
    for count in _HEADS if params.top_p < 1 or params.min_p > 0 else ():
        head = largest(logits, count)
        probabilities = _weights(logits[head], highest, temperature) / total
        if not _inside(probabilities, params)[-1]:
            return head, probabilities
    head = largest(logits, size)
    return head, _weights(logits[head], highest, temperature) / total


def _weights(logits: Floats, highest: float, temperature: float) -> Doubles:
    """Return exp((logits - highest) / temperature)."""
    scaled = logits.astype(np.float64)
    scaled /= temperature
    scaled -= highest / temperature
    return np.exp(scaled, out=scaled)


def _inside(probabilities: Doubles, params: ResolvedParams) -> npt.NDArray[np.bool_]:
    """Return a mask of the tokens that top-p and min-p keep. Tokens are in descending order; the first always stays."""
    inside = probabilities >= params.min_p * probabilities[0]
    if params.top_p < 1:
        inside &= np.cumsum(probabilities) - probabilities < params.top_p
    inside[0] = True
    return inside


def _typical(scaled: Doubles, typical_p: float) -> Indices:
    """Return the tokens whose surprise is nearest to the entropy: as few as reach the total probability `typical_p`."""
    logprobs = scaled - scaled.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    probabilities = np.exp(logprobs)
    finite = probabilities > 0
    entropy = -(probabilities[finite] @ logprobs[finite])
    order = np.argsort(np.abs(logprobs + entropy), kind="stable")
    mass = probabilities[order]
    inside = np.cumsum(mass) - mass < typical_p
    inside[0] = True
    return order[inside]
