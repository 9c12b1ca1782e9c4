"""Integers and limits that several kernels share. Imports nothing, so that every module can use it."""

from __future__ import annotations

#: The largest number of float8_e4m3fn.
FP8_MAX = 448.0


def next_power_of_2(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << max(0, size - 1).bit_length()


def cdiv(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)
