"""Checks of LoRA adapter files, because llama.cpp does not validate them and crashes on most invalid files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from ...model_files.gguf_header import GgufHeader, GgufTensor
from ...model_files.gguf_reader import read_header
from ...protocol.errors import ModelLoadError

_UNMULTIPLIED = frozenset({24, 25, 26, 27, 28})  # ggml's integer and float64 types, which have no matrix kernels
_DOWN, _UP = ".lora_a", ".lora_b"
_EMBEDDING = "token_embd.weight"  # its rows are looked up, not multiplied, so adapters store its factors transposed


def read_adapter(path: Path | str, base: GgufHeader) -> GgufHeader:
    """Read the header of an adapter and check that the adapter fits the model.

    Raises ModelLoadError if `read_header` rejects the file, or if it is not an adapter or for another model.
    """
    header = read_header(Path(path))
    wrong = next(_complaints(header, base), None)
    if wrong is not None:
        raise ModelLoadError(f"The adapter {path} cannot be used: {wrong}. Convert the adapter again for this model.")
    return header


def _complaints(header: GgufHeader, base: GgufHeader) -> Iterator[str]:
    if (header.metadata.get("general.type"), header.metadata.get("adapter.type")) != ("adapter", "lora"):
        yield "the file is not a LoRA adapter"
    if header.architecture != base.architecture:
        yield f"the adapter is for {header.architecture}, but the model is {base.architecture}"
    alpha = header.metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        yield f"the field adapter.lora.alpha is {alpha!r}, not a finite number"
    weights = {tensor.name: tensor for tensor in base.tensors}
    factors = {tensor.name: tensor for tensor in header.tensors if not tensor.name.endswith("_norm.weight")}
    for name, factor in factors.items():
        target, suffix = name[: -len(_DOWN)], name[-len(_DOWN) :]
        weight = weights.get(target)
        if suffix not in (_DOWN, _UP) or weight is None:
            yield f"the model has no weights for the adapter's tensor {name!r}"
        elif factor.kind in _UNMULTIPLIED or not factor.size:
            yield f"the tensor {name!r} has type {factor.kind}, which cannot be multiplied"
        elif len(factor.shape) != len(weight.shape) or len(factor.shape) < 2:
            yield f"the tensor {name!r} has shape {factor.shape}, but the weights have shape {weight.shape}"
        elif suffix == _DOWN:
            other = factors.get(target + _UP)
            if other is None or not _fit(weight, factor, other):
                shapes = f"{factor.shape} and {None if other is None else other.shape}"
                yield f"the factors for {target!r} have shapes {shapes}, but the weights have shape {weight.shape}"
        elif target + _DOWN not in factors:
            yield f"the adapter has only one factor for {target!r}"


def _fit(weight: GgufTensor, down: GgufTensor, up: GgufTensor) -> bool:
    """Return whether `up` times `down` has the shape of `weight`. Shapes list the fastest-changing dimension first."""
    if weight.name == _EMBEDDING:
        return weight.shape == (up.shape[1], down.shape[1]) and down.shape[0] == up.shape[0]
    ends = (down.shape[0], up.shape[1], *down.shape[2:]) == weight.shape
    return ends and down.shape[1] == up.shape[0] and down.shape[2:] == up.shape[2:]
