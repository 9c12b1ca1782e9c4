"""Matrix products of our own in place of llama.cpp's: on Linux and processors with AVX-512 VNNI.

The dynamic linker resolves a name by what was loaded globally first. So a library that exports the names of ggml's
products comes before ggml, and hands on what it does not compute (decisions 033 and 040). A type of weights is served
if the results have the very bits of ggml's; anything else leaves llama.cpp as it is.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kernels.native_library import NativeBuildError, load_from
from .llama_build import PACKAGE
from .machine import this_machine

#: llama-cpp-python whose functions have the arguments that ours have: tried in the tests.
KNOWN_VERSIONS = ("0.3.36",)
_SONAME = "libggml-cpu.so.0"  # under which they are found once loaded, from whatever file
_SOURCES = Path(__file__).parent / "native" / "products"
_log = logging.getLogger("updraft.local")
_F32 = 0  # of enum ggml_type
_SIZES = ((8, 2, 3), (6, 9, 28), (5, 40, 5))  # rows of weights, rows of activations, blocks: tiles and what is left
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of quantised weights as ggml has it. `number`: of `enum ggml_type`. A block has `values` values in
    `block_bytes` bytes, with its half-precision scale at `scale_at`. Activations beside it are of the type `beside`,
    with blocks of `beside_bytes`, which `quantizer` makes; `dot` multiplies one row by one."""

    name: str
    number: int
    values: int
    block_bytes: int
    scale_at: int
    beside: int
    beside_bytes: int
    quantizer: str
    dot: str


KINDS = (
    Kind("Q8_0", 8, 32, 34, 0, 8, 34, "quantize_row_q8_0", "ggml_vec_dot_q8_0_q8_0"),
    Kind("Q5_0", 6, 32, 22, 0, 8, 34, "quantize_row_q8_0", "ggml_vec_dot_q5_0_q8_0"),
    Kind("Q4_K", 12, 256, 144, 0, 15, 292, "quantize_row_q8_K", "ggml_vec_dot_q4_K_q8_K"),
    Kind("Q6_K", 14, 256, 210, 208, 15, 292, "quantize_row_q8_K", "ggml_vec_dot_q6_K_q8_K"),
)


@dataclass(frozen=True, slots=True)
class Served:
    """`types`: of weights whose products are ours. `reason`: why others are not, empty if all are; `fix`: what can be
    done about it, empty if nothing."""

    types: tuple[str, ...] = ()
    reason: str = ""
    fix: str = ""


def install() -> Served:
    """Before llama.cpp is loaded: make it use ours where it can. The log says why not, too."""
    try:
        served = _installed()
    except NotServedError as error:
        served = Served(reason=str(error), fix=error.fix)
    if served.types and served.reason:
        _log.warning("Some products are llama.cpp's own: %s.", served.reason)
    elif served.reason:
        _log.info("Products are llama.cpp's own: %s.", "; ".join(filter(None, (served.reason, served.fix))))
    return served


class NotServedError(Exception):
    """Why nothing is replaced, and what can be done about it."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.fix = fix


def _installed() -> Served:
    """Raises NotServedError."""
    library = known_libraries() / "libggml-cpu.so"
    if platform.system() != "Linux":
        raise NotServedError("they are replaced on Linux only")
    if "avx512_vnni" not in this_machine().instruction_sets:
        raise NotServedError("this processor has no AVX-512 VNNI")
    if _is_too_late():
        raise NotServedError(
            "llama.cpp was loaded before them, and has bound its own",
            "load a model with updraft before anything else in the process imports llama_cpp",
        )
    if not library.is_file():  # before ours are loaded, which stay in its place
        raise NotServedError(f"this build of llama.cpp has no {library.name}")
    try:
        ours = load_from(_SOURCES, ctypes.RTLD_GLOBAL)
    except NativeBuildError as error:
        raise NotServedError(f"ours could not be built ({error})", "install gcc, or set CC to a C compiler") from error
    try:
        ggml = ctypes.CDLL(str(library))
        ggml.ggml_cpu_init()  # fills its tables of half-precision numbers
        ours.updraft_hand_on(ctypes.cast(ggml.llamafile_sgemm, ctypes.c_void_p))
        ours.updraft_hand_on_tiled(ctypes.cast(ggml.ggml_compute_forward_mul_mat_tiled, ctypes.c_void_p))
        wrong = [kind for kind in KINDS if not _agrees(ours, ggml, kind)]
    except (OSError, AttributeError) as error:  # another layout, or built without the functions: nobody calls ours
        raise NotServedError(f"this build of llama.cpp has other functions ({error})") from error
    right = [kind for kind in KINDS if kind not in wrong]
    serve(ours, *right)
    reason = f"with other bits than llama.cpp's: {', '.join(kind.name for kind in wrong)}" if wrong else ""
    return Served(tuple(kind.name for kind in right), reason)


def known_libraries() -> Path:
    """The folder of llama.cpp's libraries, if it is a version that we know. Raises NotServedError."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise NotServedError(f"{PACKAGE} is not installed")
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    if version not in KNOWN_VERSIONS:
        raise NotServedError(f"{PACKAGE} {version} is not one whose products are replaced")
    return Path(spec.submodule_search_locations[0]) / "lib"


def _is_too_late() -> bool:
    """Whether ggml is in the process and ours are not: the linker has bound the names to its own functions."""
    try:
        ctypes.CDLL(_SONAME, os.RTLD_NOLOAD)
    except OSError:  # it is not loaded
        return False
    return not hasattr(ctypes.CDLL(None), "updraft_serve")


def serve(ours: ctypes.CDLL, *kinds: Kind) -> None:
    """Compute these and no others. Not while llama.cpp computes: its threads would disagree on who does what."""
    ours.updraft_serve(ctypes.c_uint32(sum(1 << kind.number for kind in kinds)))


def _agrees(ours: ctypes.CDLL, ggml: ctypes.CDLL, kind: Kind) -> bool:
    if _weights_type(ours, ggml, kind) != kind.number:
        return False
    for size in _SIZES:
        found = product(ours.updraft_product, ggml, kind, size)
        if found is None or found.tobytes() != dots(ggml, kind, size).tobytes():
            return False
    return True


def product(
    function: Any, ggml: ctypes.CDLL, kind: Kind, size: tuple[int, int, int], threads: int = 2
) -> Floats | None:
    """What `function`, a `llamafile_sgemm`, makes of scrambled blocks: (rows of activations, rows of weights). None if
    it computes no such product. `size`: rows of weights and of activations, blocks in a row."""
    rows, columns, blocks = size
    weights, activations = _weights(kind, rows, blocks), _activations(ggml, kind, columns, blocks)
    result = np.zeros((columns, rows), np.float32)
    for thread in range(threads):
        params = (ctypes.c_int * 16)(thread, threads)  # longer than ggml_compute_params, which begins so
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
            *(kind.number, kind.beside, _F32),
        )
        if not computed:
            return None
    return result


def dots(ggml: ctypes.CDLL, kind: Kind, size: tuple[int, int, int]) -> Floats:
    """The same, as ggml multiplies one row by one row."""
    rows, columns, blocks = size
    weights, activations = _weights(kind, rows, blocks), _activations(ggml, kind, columns, blocks)
    result, dot, none = np.zeros((columns, rows), np.float32), getattr(ggml, kind.dot), ctypes.c_size_t(0)
    for column, row in np.ndindex(columns, rows):
        to, one, other = (
            ctypes.c_void_p(array.ctypes.data) for array in (result[column, row:], weights[row], activations[column])
        )
        dot(blocks * kind.values, to, none, one, none, other, none, 1)
    return result


def _weights(kind: Kind, rows: int, blocks: int) -> Bytes:
    """Rows as they lie in memory, with scales of about 0.1."""
    found = (_scrambled(rows * blocks * kind.block_bytes) >> np.uint64(56)).astype(np.uint8)
    found = found.reshape(rows, blocks, kind.block_bytes)
    found[:, :, kind.scale_at + 1] = found[:, :, kind.scale_at + 1] & 0x83 | 0x2C  # sign and mantissa stay
    return found


def _activations(ggml: ctypes.CDLL, kind: Kind, rows: int, blocks: int) -> Bytes:
    """Rows as ggml quantises them."""
    count = rows * blocks * kind.values
    values = (_scrambled(2 * count)[count:] >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)
    found = np.zeros((rows, blocks, kind.beside_bytes), np.uint8)
    getattr(ggml, kind.quantizer)(
        ctypes.c_void_p(values.ctypes.data), ctypes.c_void_p(found.ctypes.data), ctypes.c_int64(count)
    )
    return found


def _scrambled(count: int) -> npt.NDArray[np.uint64]:
    """By hand, for to import numpy's generators takes longer than all else here."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return mixed * np.uint64(0xBF58476D1CE4E5B9)


class _InitParams(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("without_data", ctypes.c_bool))


def _weights_type(ours: ctypes.CDLL, ggml: ctypes.CDLL, kind: Kind) -> int:
    """What our library reads as the type of weights in a product that ggml made, whose fields it has to know."""
    for name in ("ggml_init", "ggml_new_tensor_2d", "ggml_mul_mat"):
        getattr(ggml, name).restype = ctypes.c_void_p
    context = ctypes.c_void_p(ggml.ggml_init(_InitParams(1 << 14, None, True)))
    size = ctypes.c_int64(kind.values), ctypes.c_int64(1)
    factors = [ctypes.c_void_p(ggml.ggml_new_tensor_2d(context, number, *size)) for number in (kind.number, _F32)]
    found: int = ours.updraft_weights_type(ctypes.c_void_p(ggml.ggml_mul_mat(context, *factors)))
    ggml.ggml_free(context)
    return found
