"""Experts in C for CPUs: one call for the rows of all experts, which reads only experts that have rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..linear.cpu import LINE, NativeLinear
from ..runtime.native_library import call_fields, loaded
from .types import ExpertGroups


class _ExpertsCall(ctypes.Structure):
    """The C struct `ExpertsCall` of native/calls.h."""

    _fields_ = call_fields("experts starts inputs outputs", "num_experts stride num_threads")


class NativeExperts:
    """Experts whose weights are packed for C, plain or quantized, all in one shape and format."""

    def __init__(self, layers: Sequence[NativeLinear]) -> None:
        self._layers = layers  # C keeps pointers to their weights
        self._addresses = (ctypes.c_void_p * len(layers))(*(layer.address for layer in layers))

    def __call__(self, hidden: Tensor, groups: ExpertGroups, rows: Tensor | None) -> Tensor:
        """Map row rows[pair] of `hidden`, or row `pair` without `rows`, with the pair's expert: (pairs, features).

        Rows of pairs that belong to other ranks get no values. Raises ConfigurationError for another shape or dtype.
        """
        features, inputs = self._layers[0].shape
        if hidden.shape[1:] != (inputs,) or hidden.dtype != self._layers[0].dtype or hidden.stride(1) != 1:
            raise ConfigurationError(
                f"Experts take rows of {inputs} {self._layers[0].dtype}, got {tuple(hidden.shape)} {hidden.dtype}."
            )
        if rows is not None:
            padded = hidden.new_empty(len(rows), inputs + LINE // hidden.element_size())[:, :inputs]  # see `CROWDED`
            hidden = torch.index_select(hidden, 0, rows, out=padded)
        out = hidden.new_empty(len(hidden), features)
        call = _ExpertsCall(
            experts=ctypes.addressof(self._addresses),
            starts=groups.starts.data_ptr(),
            inputs=hidden.data_ptr(),
            outputs=out.data_ptr(),
            num_experts=len(self._layers),
            stride=hidden.stride(0),
            num_threads=torch.get_num_threads(),
        )
        loaded().expert_linear(ctypes.byref(call))
        return out
