"""Gives memory back that llama.cpp has filled with zeros and may never use.

A context keeps logits for as many outputs as it has sequences, and clears them all: 19 MB with 32 sequences and a
vocabulary of 150,000, of which one answer at a time uses half a megabyte. Private pages that are given back are read as
zeros again, so that nothing else changes.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from typing import Any

from .kernels import NotServedError, known_libraries


def give_back_logits(api: Any, context: Any, count: int) -> bool:
    """The pages of a new context's first `count` logits; False where it is not known that they lie like that."""
    if platform.system() != "Linux" or api.llama_supports_gpu_offload():
        return False  # elsewhere they may be memory of another kind
    try:
        known_libraries()
    except NotServedError:
        return False
    pointer = api.llama_get_logits(context)
    if not pointer:
        return False
    page, start = mmap.PAGESIZE, ctypes.addressof(pointer.contents)
    first, end = -(-start // page) * page, (start + 4 * count) // page * page
    if end <= first:
        return False
    madvise = ctypes.CDLL(None).madvise
    return madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED) == 0
