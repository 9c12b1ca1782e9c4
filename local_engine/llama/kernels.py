"""Kernels in use by the loaded llama.cpp: Updraft's, linked in at build time, or llama.cpp's own.

`build.py` links Updraft's kernels in (decision 056), and the library selects kernels when it is loaded. This module
only reads the selection; it compiles and changes nothing. Other builds of llama.cpp work unchanged.
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

#: "on" (default), or "off" to use only llama.cpp's own kernels. Read once, when the library is loaded.
SWITCH = "UPDRAFT_LLAMA_KERNELS"
MAX_HEAD_DIM = 256  # largest key or value size that Updraft's attention kernel supports
_ATTENTION = "attention"
_FLOATS = {0, 1, 30}  # F32, F16 and BF16 of enum ggml_type
# Same as `build.REBUILD_COMMAND`; repeated here, because that module has imports that an app does not need.
_REBUILD = "python -m updraft.local_engine.llama.build --install"
_log = logging.getLogger("updraft.local")


@dataclass(frozen=True, slots=True)
class KernelsInUse:
    """Updraft's kernels in use in this process."""

    # Weight types whose matrix products Updraft's kernels compute.
    types: tuple[str, ...] = ()
    # Whether Updraft's kernel computes flash attention.
    attention: bool = False
    # Reason why llama.cpp's own kernels are in use; empty if Updraft's kernels are in use.
    reason: str = ""
    # How to get Updraft's kernels; may be empty.
    fix: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.types, _ATTENTION) if self.attention else self.types


prepare_types(KernelsInUse)


def check_switch(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigurationError if the variable UPDRAFT_LLAMA_KERNELS is neither on nor off."""
    value = environ.get(SWITCH, "on")
    if value not in ("on", "off"):
        raise ConfigurationError(f"{SWITCH} is {value!r}: set it to on or off, or unset it.")


def kernels_in_use(library: ctypes.CDLL) -> KernelsInUse:
    """Return Updraft's kernels in use by the loaded llama.cpp `library`; without any, log the reason."""
    try:
        function = library.updraft_ggml_kernels
    except AttributeError:
        served = _not_linked(this_machine())
    else:
        function.restype = ctypes.c_char_p
        served = _linked((function() or b"").decode().split())
    if served.reason:
        _log.info("llama.cpp uses its own kernels: %s.", "; ".join(filter(None, (served.reason, served.fix))))
    return served


def _linked(names: list[str]) -> KernelsInUse:
    if names:
        return KernelsInUse(tuple(name for name in names if name != _ATTENTION), _ATTENTION in names)
    if os.environ.get(SWITCH) == "off":
        return KernelsInUse(reason=f"{SWITCH} is off")
    return KernelsInUse(reason="this processor has no AVX-512 VNNI")


def _not_linked(machine: Machine) -> KernelsInUse:
    if platform.system() != "Linux":
        return KernelsInUse(reason="Updraft's kernels are for Linux")
    if "avx512_vnni" not in machine.instruction_sets:
        return KernelsInUse(reason="this processor has no AVX-512 VNNI")
    return KernelsInUse(reason="llama-cpp-python was built without Updraft's kernels", fix=f"rebuild it: {_REBUILD}")


def worth_repacking(header: GgufHeader, served: KernelsInUse) -> bool:
    """Return whether repacking by llama.cpp would make some weights of the model faster.

    This is true for weight types without an Updraft kernel, and for expert weights, which the kernels do not support.
    """
    supported = {kind.number for kind in KINDS if kind.name in served.types}
    matrices = [tensor for tensor in header.tensors if len(tensor.shape) > 1]
    return any(len(tensor.shape) > 2 or tensor.kind not in supported | _FLOATS for tensor in matrices)
