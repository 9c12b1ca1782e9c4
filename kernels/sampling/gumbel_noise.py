"""Sampling noise: counter-based random numbers in plain torch.

Noise is a pure function of a request's seed, a token's position and a counter. Noise does not depend on the batch, the
device or the order of the work. The counter of a token is `token id + 1`. Arithmetic is modulo 2**64, on int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, signed
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return one key per pair of seed and position, int64."""
    return _splitmix64(_splitmix64(seeds) ^ positions)


def uniforms(keys: Tensor, counters: Tensor) -> Tensor:
    """Return a random number in (0, 1), float64, for each pair of key and counter."""
    return (_shift_right(_splitmix64(keys + counters * _GOLDEN), 11).double() + 0.5) * 2.0**-53


def gumbel_noise(keys: Tensor, vocabulary: int) -> Tensor:
    """Return standard Gumbel noise (rows, vocabulary) float64: argmax(log p + noise) draws from p."""
    counters = torch.arange(1, vocabulary + 1, device=keys.device)
    return -torch.log(-torch.log(uniforms(keys[:, None], counters)))


def _splitmix64(words: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    words = (words ^ _shift_right(words, 30)) * _FIRST
    words = (words ^ _shift_right(words, 27)) * _SECOND
    return words ^ _shift_right(words, 31)


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Shift logically; torch's own shift keeps the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
