"""Memory of CPU tensors: kept by the process when it is freed, instead of fetched page by page for every layer anew."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_LARGEST = 2**30


def keep_freed_memory() -> bool:
    """Let the C library reuse large blocks. False where it is not glibc and nothing was done.

    By default glibc maps every large block anew and gives it back at once; the page faults take a fifth of the time of
    a prefill. The process then holds on to the most it has ever needed. For processes that do nothing else.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST - 1))
