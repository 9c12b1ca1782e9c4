"""A llama.cpp that our kernels do not fit is built as it is, and the build says so."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from updraft.local_engine.llama.build import KERNELS

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or not shutil.which("cmake") or not shutil.which("cc"),
    reason="needs Linux on x86-64, cmake and a C compiler",
)
PROJECT = """
cmake_minimum_required(VERSION 3.21)
project(ggml C)
add_library(ggml-cpu {kind} product.c)
"""
#: Names that we use, with other structures.
HEADERS = {
    "ggml.h": "struct ggml_tensor { void *data; };\n",
    "ggml-cpu-impl.h": "struct ggml_compute_params { int thread; };\n",
    "quants.h": "\n",
    "ops.h": "void ggml_compute_forward_flash_attn_ext(int);\n",
}


def configured(folder: Path, *, kind: str = "SHARED", llamafile: str = "ON") -> subprocess.CompletedProcess[str]:
    headers = folder / "src" / "ggml-cpu"
    headers.mkdir(parents=True)
    for name, text in HEADERS.items():
        (headers / name).write_text(text)
    (folder / "CMakeLists.txt").write_text(PROJECT.format(kind=kind))
    (folder / "product.c").write_text("int llamafile_sgemm(void) { return 7; }\n")
    options = [f"-DCMAKE_PROJECT_ggml_INCLUDE={KERNELS}", f"-DGGML_LLAMAFILE={llamafile}"]
    command = ["cmake", "-S", str(folder), "-B", str(folder / "build"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_other_structures_are_no_failure_but_a_warning(tmp_path: Path) -> None:
    done = configured(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "llama.cpp is built without Updraft's AVX-512 kernels" in done.stderr
    assert "types.h" in done.stderr  # what did not fit
    build = ["cmake", "--build", str(tmp_path / "build")]
    subprocess.run(build, capture_output=True, check=True)
    library = (tmp_path / "build" / "libggml-cpu.so").read_bytes()
    assert b"llamafile_sgemm" in library
    assert b"updraft" not in library


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"kind": "STATIC"}, "not a shared library"), ({"llamafile": "OFF"}, "GGML_LLAMAFILE is off")],
    ids=["static", "without llamafile"],
)
def test_builds_that_have_no_place_for_them_say_why(tmp_path: Path, options: dict[str, str], reason: str) -> None:
    done = configured(tmp_path, **options)
    assert done.returncode == 0, done.stderr
    assert reason in done.stdout
