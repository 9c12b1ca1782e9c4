"""Matrix products of our own in place of llama.cpp's: for Q8_0 weights on Linux and processors with AVX-512 VNNI.

The dynamic linker resolves a name by what was loaded globally first. So a library that exports the name of ggml's
product comes before ggml, and hands on what it does not compute (decision 033). It serves if its results have the very
bits of ggml's; anything else leaves llama.cpp as it is.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import logging
import platform
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..kernels.native_library import NativeBuildError, load_from
from .llama_build import PACKAGE
from .machine import this_machine

#: llama-cpp-python whose function has the arguments that ours has: tried in the tests.
KNOWN_VERSIONS = ("0.3.36",)
_SOURCES = Path(__file__).parent / "native" / "products"
_log = logging.getLogger("updraft.local")
_Q8_0, _F32 = 8, 0  # of enum ggml_type
_SIZES = ((8, 2, 3), (6, 9, 28), (5, 40, 5))  # rows of weights, rows of activations, blocks: tiles and what is left


def install() -> bool:
    """Before llama.cpp is loaded: make it use ours where it can. Whether it does; the log says why not."""
    folder = _known_libraries()
    if folder is None or platform.system() != "Linux" or "avx512_vnni" not in this_machine().instruction_sets:
        return False
    try:
        ours = load_from(_SOURCES, ctypes.RTLD_GLOBAL)
    except NativeBuildError as error:
        _log.info("llama.cpp's products are not replaced (%s): its own code is used.", error)
        return False
    try:
        ggml = ctypes.CDLL(str(folder / "libggml-cpu.so"))
        ggml.ggml_cpu_init()  # fills its tables of half-precision numbers
        original = ctypes.cast(ggml.llamafile_sgemm, ctypes.c_void_p)
    except (OSError, AttributeError) as error:  # another layout, or built without the function: nobody calls ours
        _log.info("llama.cpp's products cannot be replaced (%s): its own code is used.", error)
        return False
    ours.updraft_hand_on(original)
    ours.updraft_serve(1)
    if all(_agree(ours, ggml, size) for size in _SIZES):
        return True
    ours.updraft_serve(0)
    _log.warning("Products of Q8_0 matrices have other bits than llama.cpp's: its own code is used.")
    return False


def _known_libraries() -> Path | None:
    """The folder of llama.cpp's libraries, if it is a version that we know."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    if version not in KNOWN_VERSIONS:
        _log.info("%s %s is not one whose products are replaced: its own code is used.", PACKAGE, version)
        return None
    return Path(spec.submodule_search_locations[0]) / "lib"


def _agree(ours: ctypes.CDLL, ggml: ctypes.CDLL, size: tuple[int, int, int]) -> bool:
    expected, found = (product(library, size) for library in (ggml, ours))
    return expected is not None and found is not None and expected.tobytes() == found.tobytes()


def product(library: ctypes.CDLL, size: tuple[int, int, int], threads: int = 2) -> npt.NDArray[np.float32] | None:
    """What `library` makes of scrambled Q8_0 blocks: (rows of activations, rows of weights). None if it computes no
    such product. `size`: rows of weights and of activations, blocks in a row."""
    rows, columns, blocks = size
    weights, activations = _blocks(0, rows, blocks), _blocks(1, columns, blocks)
    activations[:, :, 2:][activations[:, :, 2:] == 128] = 0  # no activation is -128
    result = np.zeros((columns, rows), np.float32)
    for thread in range(threads):
        params = (ctypes.c_int * 16)(thread, threads)  # longer than ggml_compute_params, which begins so
        function = library.llamafile_sgemm
        function.restype = ctypes.c_bool
        computed = function(
            params,
            *map(ctypes.c_int64, (rows, columns, blocks)),
            ctypes.c_void_p(weights.ctypes.data),
            ctypes.c_int64(blocks),
            ctypes.c_void_p(activations.ctypes.data),
            ctypes.c_int64(blocks),
            ctypes.c_void_p(result.ctypes.data),
            ctypes.c_int64(rows),
            *(_Q8_0, _Q8_0, _F32),
        )
        if not computed:
            return None
    return result


def _blocks(seed: int, rows: int, blocks: int) -> npt.NDArray[np.uint8]:
    """Rows as they lie in memory: a half-precision scale of about 0.1 and 32 signed bytes each, scrambled by hand, for
    to import numpy's generators takes longer than all else here."""
    mixed = np.arange(1, rows * blocks * 34 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15 + 2 * seed)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    found = (mixed >> np.uint64(56)).astype(np.uint8).reshape(rows, blocks, 34)
    found[:, :, 1] = found[:, :, 1] & 0x83 | 0x2C  # of the scale: sign and mantissa stay
    return found
