"""Reader for headers of GGUF files. It rejects corrupt and hostile files before they reach llama.cpp and abort it.

The reader of the `gguf` package checks little, and takes 6 s and 500 MB for a vocabulary of 150,000 tokens. This
reader takes 0.02 s, and reads at most 64 MiB regardless of the sizes in the header.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (little-endian, version 2 or 3).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..protocol.errors import ModelLoadError
from .gguf_checks import invalid_value, missing_part
from .gguf_header import GgufArray, GgufHeader, GgufTensor

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# ggml type -> (values per block, bytes per block); for other types only the tensor's start is checked
_BLOCKS = {
    **{0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40)},
    **{10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292)},
    **{16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82)},
    **{23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2)},
    **{34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18)},
}
_REMOVED = frozenset({4, 5, 31, 32, 33, 36, 37, 38})  # types removed from llama.cpp, which aborts on some of them
_MAX_HEADER = 2**26  # maximum bytes; a vocabulary of 260,000 tokens with merges takes about 20 MB
_MAX_ENTRIES = 2**16  # limit for metadata values and for tensors; models of 100 layers with experts have about 3,000
_MAX_KEPT = 4096  # maximum length of arrays whose items are kept, such as one value per layer
_MAX_NAME, _MAX_KEY = 63, 65535  # maximum bytes of a tensor's name (llama.cpp's limit) and of a metadata key (GGUF's)


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a model file.

    Raises ModelLoadError if the file is missing, not GGUF, truncated, inconsistent, out of range or without weights.
    """
    with _mapped(path) as data:
        header = _parse(_Reader(data))
        if header.data_end > len(data):
            raise _UnusableError(f"the file is truncated ({len(data):,} of {header.data_end:,} bytes)")
        if wrong := invalid_value(header):
            raise _UnusableError(wrong)
    return header


def read_model_header(path: Path) -> GgufHeader:
    """Read and check the header of a complete language model.

    Raises the errors of `read_header`, and ModelLoadError for auxiliary files such as adapters and image encoders.
    """
    header = read_header(path)
    if lack := missing_part(header):
        raise ModelLoadError(f"The model file {path} cannot be used: {lack}. Use the model that this file belongs to.")
    return header


def read_texts(path: Path, array: GgufArray) -> list[str]:
    """Read the items of a text array, such as the tokens. Raises ModelLoadError."""
    with _mapped(path) as data:
        if array.kind != _STRING:
            raise _UnusableError("the header has numbers in place of texts")
        reader = _Reader(data, array.start)
        return [reader.string() for _ in range(array.length)]


def read_numbers(path: Path, array: GgufArray) -> list[Any]:
    """Read the items of an array of numbers, such as the scores of tokens. Raises ModelLoadError."""
    code = _SCALARS.get(array.kind)
    with _mapped(path) as data:
        if code is None:
            raise _UnusableError("the header has texts in place of numbers")
        reader = _Reader(data, array.start)
        return [reader.scalar(code) for _ in range(array.length)]


def read_short_texts(path: Path, array: GgufArray, longest: int) -> set[bytes]:
    """Read the items of a text array with at most `longest` bytes, such as byte tokens. Raises ModelLoadError."""
    with _mapped(path) as data:
        return _Reader(data, array.start).skip_strings(array.length, longest)


class _UnusableError(Exception):
    """Unusable header; `_mapped` converts it to a ModelLoadError."""


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    """Map the file into memory, and convert errors to ModelLoadError."""
    try:
        size = path.stat().st_size
        if path.is_dir() or size < 24:
            raise _UnusableError("the path is a folder" if path.is_dir() else f"the file has only {size} bytes")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
    except OSError as error:
        raise ModelLoadError(f"Cannot open the model file {path}: {error.strerror}. Check the path.") from error
    except _UnusableError as error:
        raise ModelLoadError(
            f"The model file {path} cannot be used: {error}. Download or export it again."
        ) from error.__cause__


class _Reader:
    """Cursor over the mapped header; reading past the end raises _UnusableError."""

    def __init__(self, data: mmap.mmap, position: int = 0) -> None:
        self._data = data
        self._end = min(len(data), _MAX_HEADER)
        self.position = position

    def scalar(self, code: str) -> Any:
        start = self.position
        self.skip(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self._data, start)[0]

    def skip(self, length: int) -> None:
        self.position += length
        if self.position > self._end:
            too_long = f"the header has more than {_MAX_HEADER:,} bytes"
            raise _UnusableError("the header ends early" if self._end < _MAX_HEADER else too_long)

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.position
        self.skip(length)
        try:
            return self._data[start : self.position].decode("utf-8")
        except UnicodeDecodeError as error:
            raise _UnusableError("the header is garbled (text that is not UTF-8)") from error

    def count(self, what: str) -> int:
        number = self.scalar("Q")
        if number > _MAX_ENTRIES:
            raise _UnusableError(f"the header claims {number:,} {what}, more than any model has")
        return number

    def value(self) -> Any:
        """Read a metadata value, which begins with its type."""
        kind = self.scalar("I")
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise _UnusableError(f"the header is garbled (a value of type {kind})")
        return self._array()

    def _array(self) -> GgufArray:
        kind, count = self.scalar("I"), self.scalar("Q")
        start = self.position
        if kind == _STRING:
            self.skip_strings(count)
            return GgufArray(kind, count, None, start)
        if kind not in _SCALARS:
            raise _UnusableError(f"the header is garbled (an array of type {kind})")
        code = _SCALARS[kind]
        self.skip(count * struct.calcsize("<" + code))
        kept = struct.unpack_from(f"<{count}{code}", self._data, start) if count <= _MAX_KEPT else None
        return GgufArray(kind, count, kept, start)

    def skip_strings(self, count: int, longest: int = -1) -> set[bytes]:
        """Skip strings, and return those of at most `longest` bytes. For speed, the loop calls no other method."""
        self.skip(0 if count * 8 <= self._end - self.position else self._end)
        read, data, at, end = struct.Struct("<Q").unpack_from, self._data, self.position, self._end - 8
        short: set[bytes] = set()
        for _ in range(count):
            if at > end:
                self.skip(self._end)
            start = at + 8
            at = start + read(data, at)[0]
            if at - start <= longest:
                short.add(data[start:at])
        self.position = at
        self.skip(0)
        return short


def _parse(reader: _Reader) -> GgufHeader:
    magic = struct.pack("<I", reader.scalar("I"))
    if magic != _MAGIC:
        raise _UnusableError(f"the file starts with {magic!r}, not with {_MAGIC!r}, so it is not a GGUF file")
    version = reader.scalar("I")
    if version not in (2, 3):
        raise _UnusableError(f"the GGUF version is {version}; 2 and 3 are supported")
    tensor_count, value_count = reader.count("tensors"), reader.count("metadata values")
    metadata, arrays = _metadata(reader, value_count)
    if not isinstance(metadata.get("general.architecture"), str):
        raise _UnusableError("the header does not name the model's architecture")
    if tensor_count == 0:
        raise _UnusableError("the file holds a vocabulary but no weights")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise _UnusableError(f"general.alignment must be a power of two from 8 to 2**20, not {alignment!r}")
    tensors = tuple(_tensor(reader, alignment) for _ in range(tensor_count))
    _refuse_duplicates("tensor", [tensor.name for tensor in tensors])
    data_start = math.ceil(reader.position / alignment) * alignment
    data_end = data_start + max(tensor.start + tensor.size for tensor in tensors)
    return GgufHeader(metadata, arrays, tensors, data_start, data_end)


def _metadata(reader: _Reader, count: int) -> tuple[dict[str, Any], dict[str, GgufArray]]:
    keys: list[str] = []
    values: list[Any] = []
    for _ in range(count):
        key = reader.string()
        if not 0 < len(key) <= _MAX_KEY:
            raise _UnusableError(f"the header has a key of {len(key)} characters; 1 to {_MAX_KEY} are allowed")
        keys.append(key)
        values.append(reader.value())
    _refuse_duplicates("key", keys)
    entries = dict(zip(keys, values, strict=True))
    arrays = {key: value for key, value in entries.items() if isinstance(value, GgufArray)}
    return {key: value for key, value in entries.items() if key not in arrays}, arrays


def _tensor(reader: _Reader, alignment: int) -> GgufTensor:
    name = reader.string()
    if not 0 < len(name.encode()) <= _MAX_NAME:
        raise _UnusableError(f"the name of a tensor has {len(name.encode())} bytes; 1 to {_MAX_NAME} are allowed")
    dimensions = reader.scalar("I")
    if not 1 <= dimensions <= 4:
        raise _UnusableError(f"the tensor {name!r} has {dimensions} dimensions; 1 to 4 are allowed")
    shape = tuple(reader.scalar("Q") for _ in range(dimensions))
    kind, start = reader.scalar("I"), reader.scalar("Q")
    if not all(shape) or math.prod(shape) >= 2**48:
        raise _UnusableError(f"the tensor {name!r} has the impossible shape {shape}")
    if kind in _REMOVED:
        raise _UnusableError(f"the tensor {name!r} is of type {kind}, which llama.cpp no longer reads")
    values, block = _BLOCKS.get(kind, (1, 0))
    if shape[0] % values:
        raise _UnusableError(f"the tensor {name!r} has rows of {shape[0]} values, not a multiple of {values}")
    if start % alignment or start >= 2**62:
        raise _UnusableError(f"the tensor {name!r} starts at {start:,}, not at a valid multiple of {alignment}")
    return GgufTensor(name, shape, kind, start, math.prod(shape) // values * block)


def _refuse_duplicates(what: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise _UnusableError(f"the {what} {Counter(names).most_common(1)[0][0]!r} occurs twice")
