"""The loaded llama.cpp as plain ctypes sees it, for tests of the kernels in it."""

from __future__ import annotations

import ctypes

import pytest
from updraft.local_engine.llama.library import llama


@pytest.fixture(scope="session")
def ggml() -> ctypes.CDLL:
    library = ctypes.CDLL(llama().api._lib._name)
    library.ggml_cpu_init()  # fills its tables of half-precision numbers
    return library
