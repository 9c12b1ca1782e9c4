"""Keeps freed memory of CPU tensors in the process, instead of mapping new pages for every layer."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_LARGEST = 2**30


def keep_freed_memory() -> bool:
    """Let the C library reuse large blocks. False if it is not glibc and nothing was done.

    By default glibc maps every large block anew and returns it at once; the page faults take a fifth of a prefill's
    time. Afterwards the process keeps the most memory it has ever needed. For processes that do nothing else.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST - 1))


def release_freed_memory() -> bool:
    """Give the pages of freed blocks back to the system. False where the C library is not glibc and nothing was done.

    Blocks that are replaced one by one leave holes that the next one may just miss, and the peak grows with each.
    """
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(ctypes.c_size_t(0)))
