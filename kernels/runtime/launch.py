"""Launch parameters of Triton kernels: tile sizes, warps and stages, from plain functions beside each kernel.

Kernels over the rows of a matrix are bound by memory bandwidth. Such kernels are as fast as a copy if every thread has
a few 16-byte accesses in flight and there are more than enough programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .numeric import next_power_of_2

_WARP = 32
#: Elements per thread: four 16-byte accesses for two-byte elements, eight for four-byte elements.
_ELEMENTS_PER_THREAD = 32
_MAX_WARPS = 16
#: Minimum elements per program; with fewer, the time to start programs dominates.
_ELEMENTS_PER_PROGRAM = 4096
_MAX_ROWS = 32


@dataclass(frozen=True, slots=True)
class Launch:
    num_warps: int = 4
    num_stages: int = 2
    # The kernel's constexpr arguments that affect only its speed, by name.
    tiles: Mapping[str, int] = field(default_factory=dict[str, int])


def row_launch(size: int) -> Launch:
    """Return the launch for rows of `size` elements. ROWS: rows per program. BLOCK: power of two that holds a row."""
    block = next_power_of_2(size)
    rows = min(_MAX_ROWS, max(1, _ELEMENTS_PER_PROGRAM // block))
    warps = rows * block // (_WARP * _ELEMENTS_PER_THREAD)
    return Launch(num_warps=min(_MAX_WARPS, max(1, warps)), tiles={"ROWS": rows, "BLOCK": block})
