"""Sampling in C for CPUs. Rows are not sorted, and noise is computed only for tokens that can still be chosen."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...protocol.sampling import MIN_TEMPERATURE
from ..runtime.native_library import call_fields, loaded
from .gumbel_noise import noise_keys
from .types import Sampling


class SampleCall(ctypes.Structure):
    """The C struct `SampleCall` of native/calls.h."""

    _fields_ = call_fields(
        "logits mask temperatures keys top_k top_p min_p chosen",
        "rows size stride mask_stride num_threads is_bf16",
        "min_temperature",
    )


def native_sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the tokens of `sample_reference` without typical-p, (rows,) int64; -1 if the choice depends on rounding.

    The logits must pass `uses_native`.
    """
    keys = noise_keys(sampling.seeds, sampling.positions)
    chosen = torch.empty(len(logits), dtype=torch.int64)
    loaded().sample_rows(ctypes.byref(sample_call(logits, sampling, keys, chosen)))
    return chosen


def sample_call(logits: Tensor, sampling: Sampling, keys: Tensor, chosen: Tensor) -> SampleCall:
    """Return the C structure with the arguments of a call. It points into the tensors, which must outlive it."""
    cut, mask = sampling.truncation, sampling.mask
    return SampleCall(
        logits=logits.data_ptr(),
        mask=_pointer(mask),
        temperatures=sampling.temperatures.data_ptr(),
        keys=keys.data_ptr(),
        top_k=_pointer(cut and cut.top_k),
        top_p=_pointer(cut and cut.top_p),
        min_p=_pointer(cut and cut.min_p),
        chosen=chosen.data_ptr(),
        rows=len(logits),
        size=logits.shape[1],
        stride=logits.stride(0),
        mask_stride=0 if mask is None else mask.stride(0),
        num_threads=torch.get_num_threads(),
        is_bf16=logits.dtype == torch.bfloat16,
        min_temperature=MIN_TEMPERATURE,
    )


def _pointer(column: Tensor | None) -> int | None:
    return None if column is None else column.data_ptr()
