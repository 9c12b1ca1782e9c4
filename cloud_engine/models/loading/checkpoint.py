"""Hugging Face style model folders as a source of weights."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from ....protocol.decoding import prepare_types
from ....protocol.errors import ModelLoadError
from ..fields import Fields, read_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_BYTES_AT_ONCE = 2**24
_METADATA = "__metadata__"
_LENGTH_BYTES = 8  # length of the header, at the start of a file
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTIZED = {"I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
#: Types that only quantized layers use.
_OTHERS = {**_QUANTIZED, "I32": torch.int32, "I64": torch.int64}


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in the header of a safetensors file; `data_offsets` are in bytes after the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


prepare_types(_Entry)


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor in a memory-mapped file; `start` and `end` are in bytes."""

    path: Path
    mapping: mmap.mmap
    entry: _Entry
    start: int
    end: int


class SafetensorsFolder:
    """A folder with `config.json` and `model.safetensors`, or shards with an index. Raises ModelLoadError if damaged.

    `where` is the folder's name in error messages; `fields` is the model's configuration. Each file is opened and
    memory-mapped once. Pages that have been read are released, so that loading never needs much more memory than the
    weights.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self.fields = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
        self._tensors = {name: tensor for path in _files(folder) for name, tensor in _stored(path).items()}
        layers = self.fields.optional_integer("num_hidden_layers") or 0
        if layers > len(self._tensors):
            raise ModelLoadError(f"{folder}: {layers} layers in config.json, but only {len(self._tensors)} tensors.")

    def difference(self, expected: set[str]) -> tuple[set[str], set[str]]:
        """Return the `expected` tensors that are missing, and the existing tensors that are not expected."""
        return expected - self._tensors.keys(), self._tensors.keys() - expected

    def has(self, name: str) -> bool:
        return name in self._tensors

    def is_quantized(self, name: str) -> bool:
        """Return whether a tensor is stored with 8 bits per number."""
        return self._tensors[name].entry.dtype in _QUANTIZED

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].entry.shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the type that a tensor is stored in; float32 for types that the engine does not compute in."""
        stored = _DTYPES.get(self._tensors[name].entry.dtype, torch.float32)
        return torch.float32 if stored is torch.float64 else stored

    def copy_into(self, name: str, target: Tensor) -> None:
        """Copy a tensor into `target`, which has the same shape, converting to its dtype."""
        stored = self._tensors[name]
        source = _numbers(name, stored, _DTYPES)
        rows = max(1, _BYTES_AT_ONCE * len(target) // (target.numel() * 4))
        for into, piece in zip(target.split(rows), source.view(target.shape).split(rows), strict=True):
            into.copy_(piece)
            stored.mapping.madvise(mmap.MADV_DONTNEED)  # release pages that have been read

    def read(self, name: str) -> Tensor:
        """Return a copy of a tensor as it is stored."""
        stored = self._tensors[name]
        tensor = _numbers(name, stored, {**_DTYPES, **_OTHERS}).clone().view(stored.entry.shape)
        stored.mapping.madvise(mmap.MADV_DONTNEED)
        return tensor


def _numbers(name: str, stored: _StoredTensor, known: Mapping[str, torch.dtype]) -> Tensor:
    """Return the numbers of a tensor in its file. Raises ModelLoadError if their type is not in `known`."""
    dtype, count = known.get(stored.entry.dtype), math.prod(stored.entry.shape)
    if dtype is None:
        raise ModelLoadError(f"{stored.path}: {name} has the dtype {stored.entry.dtype}; use {', '.join(known)}.")
    if stored.end - stored.start != count * dtype.itemsize:
        raise ModelLoadError(f"{stored.path} is damaged: {name} has the wrong number of bytes.")
    return torch.frombuffer(stored.mapping, dtype=dtype, offset=stored.start, count=count)


def _files(folder: Path) -> list[Path]:
    """Return the files with the folder's weights."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not (folder / _INDEX).is_file():
        raise ModelLoadError(
            f"{folder / _SINGLE} does not exist, nor does {_INDEX}. Use a folder with safetensors weights."
        )
    listed = Fields(read_json(folder / _INDEX), str(folder / _INDEX)).mapping("weight_map")
    shards = {str(shard) for shard in listed.values()}
    stray = sorted(shard for shard in shards if Path(shard).name != shard)
    if stray:
        raise ModelLoadError(f"{folder / _INDEX} names files outside its folder: {', '.join(stray[:3])}.")
    absent = sorted(shard for shard in shards if not (folder / shard).is_file())
    if absent:
        raise ModelLoadError(f"{folder}: missing {len(absent)} of {len(shards)} shards: {', '.join(absent[:3])}.")
    return [folder / shard for shard in sorted(shards)]


def _stored(path: Path) -> dict[str, _StoredTensor]:
    """Map a safetensors file, and return its tensors. Source: "Format" in safetensors' README."""
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch warns of read-only buffers
        data = _LENGTH_BYTES + int.from_bytes(mapping[:_LENGTH_BYTES], "little")
        header = msgspec.json.decode(mapping[_LENGTH_BYTES:data], type=dict[str, msgspec.Raw])
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items() if name != _METADATA}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is damaged or not a safetensors file: {error}") from error
    tensors: dict[str, _StoredTensor] = {}
    for name, entry in entries.items():
        start, end = (data + offset for offset in entry.data_offsets)
        if not data <= start <= end <= len(mapping):
            raise ModelLoadError(f"{path} is damaged: {name} is not within the file.")
        tensors[name] = _StoredTensor(path, mapping, entry, start, end)
    return tensors
