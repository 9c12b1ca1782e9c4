"""What the header of a GGUF file holds, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tensor:
    """An entry of the tensor table. `shape`: values per dimension, the fastest first. `start`: bytes from the start of
    all tensor data. `size`: bytes; 0 for a `kind` (ggml's number of the type) that is not known here."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Array:
    """`kind`: the format's number of the type of its items. `items`: None where they are text or many."""

    kind: int
    length: int
    items: tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`metadata`: every scalar and string value. `data_end`: bytes the file must have."""

    metadata: dict[str, Any]
    arrays: dict[str, Array]
    tensors: tuple[Tensor, ...]
    data_end: int

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
        """A value under the architecture's own prefix, such as `block_count`; None if the file does not say.

        Where it differs between layers it is an `Array`.
        """
        key = f"{self.architecture}.{name}"
        return self.metadata.get(key, self.arrays.get(key))
