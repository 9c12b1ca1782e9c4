"""Functions in the place of a library's own: in its calls and nobody else's, also where the linker has sealed them."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from updraft.kernels.runtime.native_library import load_from
from updraft.local_engine.llama import kernels as ggml
from updraft.local_engine.llama.library import llama

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or shutil.which("cc") is None,
    reason="slots are looked for on Linux and x86-64, and the test needs a compiler",
)
SOURCE = """
int llamafile_sgemm(void) { return NUMBER; }
int unknown_of_all(void) { return NUMBER; }
int call(void) { return llamafile_sgemm(); }
"""
Flags = tuple[str, ...]


def library(folder: Path, number: int, *flags: str) -> ctypes.CDLL:
    source, target = folder / "source.c", folder / f"lib{number}.so"
    source.write_text(SOURCE)
    command = ["cc", "-O0", "-fPIC", "-shared", f"-DNUMBER={number}", *flags, "-o", str(target), str(source)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(target))


def put(where: ctypes.CDLL, name: str, function: object) -> bool:
    ours = load_from(ggml.SOURCES)
    ours.updraft_put_in_place.restype = ctypes.c_bool
    found: bool = ours.updraft_put_in_place(
        ctypes.c_void_p(where._handle), name.encode(), ctypes.cast(function, ctypes.c_void_p)
    )
    return found


def protection(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_ = line.split()
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address < high:
            return rights
    raise AssertionError("nothing is there")


@pytest.mark.parametrize("flags", [("-Wl,-z,lazy",), ("-Wl,-z,relro,-z,now",)], ids=["lazy", "sealed"])
def test_a_library_calls_what_was_put_in_place_and_another_does_not(flags: Flags, tmp_path: Path) -> None:
    one, other = (library(tmp_path, number, *flags) for number in (11, 22))
    mine = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 33)
    assert (one.call(), other.call()) == (11, 22)
    assert put(one, "llamafile_sgemm", mine)
    assert (one.call(), other.call(), one.llamafile_sgemm()) == (33, 22, 11)
    assert library(tmp_path, 44, *flags).call() == 44
    assert put(one, "llamafile_sgemm", one.llamafile_sgemm)
    assert one.call() == 11


def test_what_was_sealed_is_sealed_again(tmp_path: Path) -> None:
    sealed = library(tmp_path, 5, "-Wl,-z,relro,-z,now")
    relocations = subprocess.run(
        ["readelf", "-rW", str(tmp_path / "lib5.so")], capture_output=True, text=True, check=True
    ).stdout
    place = next(int(line.split()[0], 16) for line in relocations.splitlines() if "llamafile_sgemm" in line)
    base = next(
        int(line.split("-")[0], 16) for line in Path("/proc/self/maps").read_text().splitlines() if "lib5.so" in line
    )
    assert protection(base + place).startswith("r--")
    assert put(sealed, "llamafile_sgemm", ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 6))
    assert protection(base + place).startswith("r--")


def test_what_is_never_called_cannot_be_replaced(tmp_path: Path) -> None:
    assert not put(library(tmp_path, 7), "unknown_of_all", ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 8))


def test_a_library_with_functions_of_the_same_names_keeps_them(tmp_path: Path) -> None:
    """As a package that brings a ggml of its own."""
    llama()
    assert library(tmp_path, 9).call() == 9
