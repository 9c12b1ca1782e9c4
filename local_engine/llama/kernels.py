"""The code that computes in the loaded llama.cpp: kernels of ours, linked in when it was built, or its own.

`build.py` links them in (decision 056), and the library itself chooses when it is loaded. Nothing is compiled or
changed here: this module only asks. A llama.cpp that was built otherwise runs as it is.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from ...model_files.gguf_header import GgufHeader
from ...protocol.decoding import prepare_types
from ...protocol.errors import ConfigurationError
from ..machine.machine import Machine, this_machine
from .product_check import KINDS

#: "on", the default, or "off": llama.cpp's own code computes everything. Read once, when the library is loaded.
SWITCH = "UPDRAFT_LLAMA_KERNELS"
MAX_HEAD_DIM = 256  # numbers of a key or a value, of which our attention takes no more
_ATTENTION = "attention"
_FLOATS = {0, 1, 30}  # F32, F16 and BF16 of enum ggml_type
# As `build.REBUILD_COMMAND`; that module imports much that an app does not need.
_REBUILD = "python -m updraft.local_engine.llama.build --install"
_log = logging.getLogger("updraft.local")


@dataclass(frozen=True, slots=True)
class Served:
    """The kernels of ours that serve in a process."""

    # Weights whose matrix products are ours.
    types: tuple[str, ...] = ()
    # Whether flash attention is ours, too.
    attention: bool = False
    # Why llama.cpp's own code serves; empty where ours does.
    reason: str = ""
    # The remedy; empty if there is none.
    fix: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.types, _ATTENTION) if self.attention else self.types


prepare_types(Served)


def check_switch(environ: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigurationError for a value that means nothing."""
    value = environ.get(SWITCH, "on")
    if value not in ("on", "off"):
        raise ConfigurationError(f"{SWITCH} is {value!r}: set it to on or off, or unset it.")


def served_by(library: ctypes.CDLL) -> Served:
    """The kernels that serve in the loaded `library`, llama.cpp's. The log says why ours do not."""
    try:
        function = library.updraft_ggml_kernels
    except AttributeError:
        served = _not_linked(this_machine())
    else:
        function.restype = ctypes.c_char_p
        served = _linked((function() or b"").decode().split())
    if served.reason:
        _log.info("llama.cpp computes with its own code: %s.", "; ".join(filter(None, (served.reason, served.fix))))
    return served


def _linked(names: list[str]) -> Served:
    if names:
        return Served(tuple(name for name in names if name != _ATTENTION), _ATTENTION in names)
    if os.environ.get(SWITCH) == "off":
        return Served(reason=f"{SWITCH} is off")
    return Served(reason="this processor has no AVX-512 VNNI")


def _not_linked(machine: Machine) -> Served:
    if platform.system() != "Linux":
        return Served(reason="our kernels are for Linux")
    if "avx512_vnni" not in machine.instruction_sets:
        return Served(reason="this processor has no AVX-512 VNNI")
    return Served(reason="llama-cpp-python was built without our kernels", fix=f"rebuild it: {_REBUILD}")


def worth_repacking(header: GgufHeader, served: Served) -> bool:
    """Whether some weights of a model are faster in llama.cpp's own other form.

    These are types that are not ours, and experts, whose products never reach our kernels.
    """
    ours = {kind.number for kind in KINDS if kind.name in served.types}
    matrices = [tensor for tensor in header.tensors if len(tensor.shape) > 1]
    return any(len(tensor.shape) > 2 or tensor.kind not in ours | _FLOATS for tensor in matrices)
