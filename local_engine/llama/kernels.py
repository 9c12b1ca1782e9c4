"""Products and attention of our own in place of llama.cpp's: on Linux and processors with AVX-512.

ggml calls these functions of its own through slots that the dynamic linker fills. Ours are put there, in this library
and no other, and hand on what they do not compute (decisions 033, 040, 050 and 051). What is served has been compared
with ggml's results, or with what they are by definition; anything else leaves llama.cpp as it is.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...kernels.runtime.native_library import NativeBuildError, load_from
from ...model_files.gguf_header import GgufHeader
from ...protocol.errors import ConfigurationError
from ..machine.machine import this_machine
from . import attention_check as attention
from .product_check import KINDS, Kind, agrees

#: llama-cpp-python whose functions have the arguments that ours have: tried in the tests.
KNOWN_VERSIONS = ("0.3.36",)
#: "llama.cpp": leave it as it is, in this process. "ours", the default: replace what can be replaced.
SWITCH = "UPDRAFT_PRODUCTS"
LONGEST_HEAD = 256  # numbers of a key or a value, of which our attention takes no more
SOURCES = Path(__file__).parent / "native" / "ggml"
_VERSION = re.compile(r"""^__version__ = ["'](.+)["']""", re.MULTILINE)
_FLOATS = {0, 1, 30}  # F32, F16 and BF16 of enum ggml_type
_SONAME = "libggml-cpu.so.0"  # under which it is found once loaded, from whatever file
#: Of ggml's functions, ours.
_IN_PLACE = {
    "llamafile_sgemm": "updraft_sgemm",
    "ggml_compute_forward_mul_mat_tiled": "updraft_mul_mat_tiled",
    "ggml_compute_forward_flash_attn_ext": "updraft_flash_attention",
}
_log = logging.getLogger("updraft.local")


@dataclass(frozen=True, slots=True)
class Served:
    """`types`: of weights whose products are ours. `attention`: whether that is ours, too. `reason`: why others are
    not, empty if all are; `fix`: what can be done about it, empty if nothing."""

    types: tuple[str, ...] = ()
    attention: bool = False
    reason: str = ""
    fix: str = ""


class NotServedError(Exception):
    """Why nothing is replaced, and what can be done about it."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.fix = fix


def install() -> Served:
    """Before llama.cpp is loaded: make it use ours where it can. The log says why not, too.

    Raises ConfigurationError for a value of `SWITCH` that means nothing.
    """
    try:
        served = _installed()
    except NotServedError as error:
        served = Served(reason=str(error), fix=error.fix)
    if served.types and served.reason:
        _log.warning("Some of what llama.cpp computes is its own: %s.", served.reason)
    elif served.reason:
        _log.info("All that llama.cpp computes is its own: %s.", "; ".join(filter(None, (served.reason, served.fix))))
    return served


def _installed() -> Served:
    """Raises NotServedError."""
    _require()
    library = known_libraries() / "libggml-cpu.so"
    if not library.is_file():
        raise NotServedError(f"this build of llama.cpp has no {library.name}")
    try:
        ours = load_from(SOURCES)
    except NativeBuildError as error:
        raise NotServedError(f"ours could not be built ({error})", "install gcc, or set CC to a C compiler") from error
    ours.updraft_is_known.restype = ours.updraft_put_in_place.restype = ctypes.c_bool
    if _is_loaded() and not ours.updraft_is_known():
        raise NotServedError(
            "llama.cpp was loaded before ours, and may be computing",
            "load a model with updraft before anything else in the process imports llama_cpp",
        )
    try:
        ggml = ctypes.CDLL(str(library))
        ggml.ggml_cpu_init()  # fills its tables of half-precision numbers
        ours.updraft_hand_on(*(ctypes.cast(getattr(ggml, name), ctypes.c_void_p) for name in _IN_PLACE))
        right = [kind for kind in KINDS if agrees(ours, ggml, kind)]
        attends = attention.agrees(ours, ggml)
        _put_in_place(ours, ggml)
    except (OSError, AttributeError) as error:  # another layout, or built without the functions
        raise NotServedError(f"this build of llama.cpp has other functions ({error})") from error
    serve(ours, right, attends=attends)
    wrong = [kind.name for kind in KINDS if kind not in right] + ([] if attends else ["attention"])
    reason = f"ours have other results for {', '.join(wrong)}" if wrong else ""
    return Served(tuple(kind.name for kind in right), attends, reason)


def _require() -> None:
    """Raises NotServedError where nothing can be replaced, ConfigurationError."""
    switch = os.environ.get(SWITCH, "ours")
    if switch not in ("ours", "llama.cpp"):
        raise ConfigurationError(f"{SWITCH} is {switch!r}: set it to ours or llama.cpp, or unset it.")
    if switch == "llama.cpp":
        raise NotServedError(f"{SWITCH} says so")
    if "LLAMA_CPP_LIB_PATH" in os.environ:
        raise NotServedError("LLAMA_CPP_LIB_PATH names another build of llama.cpp, which is not known here")
    if platform.system() != "Linux":
        raise NotServedError("it is replaced on Linux only")
    if "avx512_vnni" not in this_machine().instruction_sets:
        raise NotServedError("this processor has no AVX-512 VNNI")


def worth_repacking(header: GgufHeader, served: Served) -> bool:
    """Whether some weights of a model are faster in llama.cpp's own other form: types that are not ours, and experts,
    whose products do not come by here."""
    ours = {kind.number for kind in KINDS if kind.name in served.types}
    matrices = [tensor for tensor in header.tensors if len(tensor.shape) > 1]
    return any(len(tensor.shape) > 2 or tensor.kind not in ours | _FLOATS for tensor in matrices)


def known_libraries() -> Path:
    """The folder of llama.cpp's libraries, if it is a version that we know. Raises NotServedError."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise NotServedError("llama-cpp-python is not installed")
    folder = Path(spec.submodule_search_locations[0])
    # Not by importlib.metadata, which takes a megabyte and some time.
    stated = _VERSION.search((folder / "__init__.py").read_text(encoding="utf-8"))
    version = stated[1] if stated else "of unknown version"
    if version not in KNOWN_VERSIONS:
        raise NotServedError(f"llama-cpp-python {version} is not one that is known here")
    return folder / "lib"


def _is_loaded() -> bool:
    """Whether ggml is in the process."""
    try:
        ctypes.CDLL(_SONAME, os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _put_in_place(ours: ctypes.CDLL, ggml: ctypes.CDLL) -> None:
    """Raises AttributeError where ggml does not call what is to be replaced."""
    handle = ctypes.c_void_p(ggml._handle)
    for name, function in _IN_PLACE.items():
        if not ours.updraft_put_in_place(handle, name.encode(), ctypes.cast(getattr(ours, function), ctypes.c_void_p)):
            raise AttributeError(f"{name} is not called by its name")


def serve(ours: ctypes.CDLL, kinds: Iterable[Kind] = (), *, attends: bool = False) -> None:
    """Compute these and no others. Not while llama.cpp computes: its threads would disagree on who does what."""
    ours.updraft_serve(ctypes.c_uint32(sum(1 << kind.number for kind in kinds)), ctypes.c_bool(attends))
