"""Data types for the header of a GGUF file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Entry of the tensor table."""

    name: str
    shape: tuple[int, ...]  # values per dimension, fastest-varying first
    kind: int  # ggml's id of the data type
    start: int  # offset from the start of the tensor data, in bytes
    size: int  # size in bytes; 0 for an unknown data type


@dataclass(frozen=True, slots=True)
class GgufArray:
    """Array in the metadata."""

    kind: int  # GGUF's id of the item type
    length: int
    items: tuple[Any, ...] | None  # the array's values; None for texts and for long arrays
    start: int = 0  # offset of the items in the file, in bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Header of a GGUF file that passed all checks."""

    metadata: dict[str, Any]  # all scalars and texts
    arrays: dict[str, GgufArray]
    tensors: tuple[GgufTensor, ...]
    data_start: int  # offset of the tensor data in the file, in bytes
    data_end: int  # minimum size of the file, in bytes

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    @property
    def parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    def hyperparameter(self, name: str) -> Any:
        """Return a value with the architecture's prefix, such as `block_count`; None if missing.

        A value that differs between layers is a `GgufArray`.
        """
        key = f"{self.architecture}.{name}"
        return self.metadata.get(key, self.arrays.get(key))
