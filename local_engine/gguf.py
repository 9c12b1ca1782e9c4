"""Reads the header of a GGUF file, so that a damaged one is refused before llama.cpp, which may abort, sees it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (little-endian, version 2 or 3).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..protocol.errors import ModelLoadError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# ggml type -> (values per block, bytes per block); a type that is missing here is only checked for its start
_BLOCKS = {
    **{0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34)},
    **{10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292)},
    **{20: (32, 18), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2)},
}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`metadata`: every scalar and string value; arrays are skipped. `data_end`: bytes the file must have."""

    metadata: dict[str, Any]
    tensor_count: int
    data_end: int

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a model file.

    Raises ModelLoadError, saying what to do, for a file that is missing, not GGUF, truncated, inconsistent or without
    weights.
    """
    try:
        size = path.stat().st_size
        if path.is_dir() or size < 24:
            raise _unusable(path, "it is a folder" if path.is_dir() else f"it has only {size} bytes")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _parse(path, _Reader(data))
    except OSError as error:
        raise ModelLoadError(f"Cannot open the model file {path}: {error.strerror}. Check the path.") from error
    except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
        raise _unusable(path, "its header ends early or is garbled") from error
    if header.data_end > size:
        raise _unusable(path, f"it is truncated ({size:,} of {header.data_end:,} bytes)")
    return header


class _Reader:
    """A cursor over the mapped file; reading past the end raises struct.error or IndexError."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def skip(self, length: int) -> None:
        self.at += length
        if self.at > len(self._data):
            raise IndexError("past the end of the file")

    def string(self) -> str:
        start = self.at + 8
        self.skip(8 + self.scalar_at("Q"))
        return self._data[start : self.at].decode("utf-8")

    def scalar_at(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self._data, self.at)[0]

    def value(self, kind: int) -> Any:
        """One metadata value; None for an array, which is skipped."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise IndexError(f"unknown value type {kind}")
            return self.scalar(_SCALARS[kind])
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            self.skip(count * struct.calcsize("<" + _SCALARS[item]))
        elif item == _STRING:
            for _ in range(count):
                self.skip(8 + self.scalar_at("Q"))
        else:
            raise IndexError(f"unknown array type {item}")
        return None


def _parse(path: Path, reader: _Reader) -> GgufHeader:
    magic = struct.pack("<I", reader.scalar("I"))
    if magic != _MAGIC:
        raise _unusable(path, f"it starts with {magic!r}, not with {_MAGIC!r}, so it is no GGUF file")
    version = reader.scalar("I")
    if version not in (2, 3):
        raise _unusable(path, f"its GGUF version is {version}; 2 and 3 are supported")
    tensor_count, value_count = reader.scalar("Q"), reader.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = reader.string()
        value = reader.value(reader.scalar("I"))
        if value is not None:
            metadata[key] = value
    if "general.architecture" not in metadata:
        raise _unusable(path, "it does not say which architecture it is for")
    if tensor_count == 0:
        raise _unusable(path, "it holds a vocabulary but no weights")
    ends = [_tensor_end(reader) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise _unusable(path, f"its alignment is {alignment}")
    data_start = math.ceil(reader.at / alignment) * alignment
    return GgufHeader(metadata, tensor_count, data_start + max(ends))


def _tensor_end(reader: _Reader) -> int:
    """Where the data of the next tensor of the table ends, in bytes from the start of all tensor data."""
    reader.string()
    shape = [reader.scalar("Q") for _ in range(reader.scalar("I"))]
    kind, offset = reader.scalar("I"), reader.scalar("Q")
    values, size = _BLOCKS.get(kind, (1, 0))
    return offset + math.prod(shape) // values * size


def _unusable(path: Path, why: str) -> ModelLoadError:
    return ModelLoadError(f"The model file {path} cannot be used: {why}. Download or export it again.")
