"""Sampling noise, identical on both tiers: a seed gives the same tokens on the device and in the cloud.

Sampling is Gumbel-max: argmax(logits / temperature - log(-log(u))) draws from softmax(logits / temperature). The
uniform number u of a token depends only on the request's seed and on the token's id and position in the sequence:

    key = mix(mix(seed) ^ position)
    u = ((mix(key + (id + 1) * GOLDEN) >> 11) + 0.5) * 2**-53        in float64, integers modulo 2**64

This module computes the key of each row in plain integers. Each engine computes u from the key with its array library.
"""

from __future__ import annotations

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(word: int) -> int:
    """Apply the finalizer of SplitMix64 (Steele, Lea, Flood 2014) to 0 <= word < 2**64."""
    word = (word ^ (word >> 30)) * FIRST % WORD
    word = (word ^ (word >> 27)) * SECOND % WORD
    return word ^ (word >> 31)


def noise_key(seed: int, position: int) -> int:
    """Return the key of the token at `position`, counted over prompt and answer. `seed` is taken modulo 2**64."""
    return mix(mix(seed % WORD) ^ position)
