"""The header of a GGUF file, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """An entry of the tensor table."""

    name: str
    shape: tuple[int, ...]  # values per dimension, the fastest first
    kind: int  # ggml's number of the data type
    start: int  # bytes after the start of all tensor data
    size: int  # bytes; 0 for a kind that is not known here


@dataclass(frozen=True, slots=True)
class GgufArray:
    """A metadata value with many items."""

    kind: int  # the format's number of the type of its items
    length: int
    items: tuple[Any, ...] | None  # None where they are text or many
    start: int = 0  # byte of the file where the items begin


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A checked header."""

    metadata: dict[str, Any]  # every scalar and text
    arrays: dict[str, GgufArray]
    tensors: tuple[GgufTensor, ...]
    data_start: int  # byte of the file where the tensor data begin
    data_end: int  # bytes the file must have

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    @property
    def tensor_count(self) -> int:
        return len(self.tensors)

    @property
    def parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    def hyperparameter(self, name: str) -> Any:
        """A value under the architecture's own prefix, such as `block_count`; None if the file has none.

        A value that differs between layers is a `GgufArray`.
        """
        key = f"{self.architecture}.{name}"
        return self.metadata.get(key, self.arrays.get(key))
