"""Reuse of freed CPU tensor memory within the process, instead of mapping new pages for every layer."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_LARGEST = 2**30


def keep_freed_memory() -> bool:
    """Let the C library reuse large blocks. Returns False if it is not glibc, and then does nothing.

    By default, glibc maps every large block anew and unmaps it at once; the page faults take a fifth of a prefill's
    time. With this setting, the process keeps its peak memory, so use it only in dedicated processes.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST - 1))


def release_freed_memory() -> bool:
    """Return the pages of freed blocks to the system. Returns False without glibc, and then does nothing.

    Without this, replacing blocks one by one leaves holes slightly too small for the next block, and the peak grows.
    """
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(ctypes.c_size_t(0)))
