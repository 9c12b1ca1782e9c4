"""Integer helpers and limits shared by several kernels. Imports nothing, so that every module can use it."""

from __future__ import annotations

#: Largest finite float8_e4m3fn value.
FP8_MAX = 448.0
#: Compute capability from which GPUs multiply and convert FP8.
FP8_CAPABILITY = (8, 9)


def next_power_of_2(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()


def cdiv(numerator: int, denominator: int) -> int:
    """Return the quotient, rounded up."""
    return -(-numerator // denominator)
