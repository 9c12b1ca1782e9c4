"""Gumbel noise for one row of a large vocabulary, as in `protocol.sampling_noise`, but only where noise can matter.

Two double-precision logarithms for each of 150,000 tokens would cost more than the rest of sampling. So the draw is
treated as a race: argmax(logit / T - log(-log u)) equals argmin(-log(u) / weight), the first token to arrive, with
weight = exp((logit - highest) / T). As -log(u) >= 1 - u, no token arrives before (1 - u) / weight, a bound that is
cheap in single precision. Tokens whose bound is later than the arrival of one promising token cannot win; exact noise
decides among the few others.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ...protocol.sampling import FIRST, GOLDEN, SECOND, WORD

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Words = npt.NDArray[np.uint64]

_BLOCK = 2**14
_FEW = 512  # up to this many tokens, noise for all is as cheap as a search for the likely winners
_FAR = np.float32(60)  # tokens this far below the highest logit / T cannot win; 2**31 * exp(60) is finite in float32
# Relative tolerance of the bound: a hundred times float32's rounding error of exp up to `_FAR`, which also covers
# float64's rounding errors if |logit / temperature| is below 2**42.
_SLACK = 1e-3


def draw(key: int, ids: Indices | None, logits: Floats, temperature: float) -> int:
    """Return the index in `logits` (n,) of a draw from softmax(logits / temperature); one logit must be finite.

    `ids` (n,): token ids of the logits, in ascending order; None for all ids from 0 on.
    """
    if len(logits) <= _FEW:
        return int(_scores(key, _of(ids, np.arange(len(logits))), logits, temperature).argmax())
    earliest = _earliest_arrivals(key, ids, logits, temperature)
    promising = np.array([earliest.argmin(), logits.argmax()])
    gap = (logits.max() - logits[promising]).astype(np.float64) / temperature
    arrival = (np.exp(np.minimum(gap, 700)) * -np.log(uniforms(key, _of(ids, promising)))).min()
    contenders = np.flatnonzero(earliest <= np.float32(arrival * (1 + _SLACK)))
    return int(contenders[_scores(key, _of(ids, contenders), logits[contenders], temperature).argmax()])


def uniforms(key: int, ids: Indices) -> Doubles:
    """Return the uniform numbers in (0, 1] of the tokens `ids` (n,), float64."""
    words = _mix_in_place(ids.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64((key + GOLDEN) % WORD))
    words ^= words >> np.uint64(31)
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def blocks(size: int) -> Iterator[slice]:
    """Yield slices that divide `size` numbers into blocks small enough for the processor's cache."""
    return (slice(start, start + _BLOCK) for start in range(0, size, _BLOCK))


def _of(ids: Indices | None, indices: Indices) -> Indices:
    return indices if ids is None else ids[indices]


def _scores(key: int, ids: Indices, logits: Floats, temperature: float) -> Doubles:
    with np.errstate(divide="ignore"):  # once in 2**53, a uniform number is 1 and its noise infinite
        return logits.astype(np.float64) / temperature - np.log(-np.log(uniforms(key, ids)))


def _earliest_arrivals(key: int, ids: Indices | None, logits: Floats, temperature: float) -> Floats:
    """Return a lower bound of each token's arrival time, float32 (n,), subject to rounding errors."""
    highest, rate = logits.max(), np.float32(1 / temperature)
    earliest = np.empty(len(logits), np.float32)
    first = np.arange(1, min(_BLOCK, len(logits)) + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    for block in blocks(len(logits)):
        delay = highest - logits[block]
        delay *= rate
        np.minimum(delay, _FAR, out=delay)
        np.exp(delay, out=delay)
        if ids is None:
            words = first[: len(delay)] + np.uint64((key + block.start * GOLDEN) % WORD)
        else:
            words = ids[block].astype(np.uint64) * np.uint64(GOLDEN)
            words += np.uint64((key + GOLDEN) % WORD)
        words = _mix_in_place(words)
        np.invert(words, out=words)
        words >>= np.uint64(33)  # 1 - u in units of 2**-31, rounded down
        np.multiply(words.astype(np.float32), delay, out=earliest[block])
    earliest *= np.float32(2.0**-31)
    return earliest


def _mix_in_place(words: Words) -> Words:
    """Apply `protocol.sampling_noise.mix` in place, without its last step, which does not change the upper 31 bits."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(FIRST)
    words ^= words >> np.uint64(27)
    words *= np.uint64(SECOND)
    return words
