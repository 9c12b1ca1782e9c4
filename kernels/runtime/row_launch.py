"""How kernels over the rows of a matrix are launched: one row, or several short ones, in each program.

Such kernels only stream memory. They are as fast as a copy if every thread has a few 16-byte accesses in flight and
there are more than enough programs.
"""

from __future__ import annotations

from .launch import Launch, launch_for
from .numeric import next_power_of_2

_WARP = 32
#: Four accesses of 16 bytes a thread for two-byte elements, eight for four-byte ones.
_ELEMENTS_PER_THREAD = 32
_MOST_WARPS = 16
#: A program with fewer elements spends its time on starting.
_ELEMENTS_PER_PROGRAM = 4096
_MOST_ROWS = 32


def row_launch(kernel: str, size: int, gpu_name: str) -> Launch:
    """For rows of `size` elements: tiles ROWS and BLOCK, the power of two that holds a row."""
    block = next_power_of_2(size)
    rows = min(_MOST_ROWS, max(1, _ELEMENTS_PER_PROGRAM // block))
    warps = rows * block // (_WARP * _ELEMENTS_PER_THREAD)
    heuristic = Launch(num_warps=min(_MOST_WARPS, max(1, warps)), tiles={"ROWS": rows, "BLOCK": block})
    return launch_for(kernel, str(size), gpu_name, heuristic)
