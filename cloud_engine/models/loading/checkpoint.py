"""Hugging Face style model folders as a source of weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ....protocol.errors import ModelLoadError
from ..fields import Fields, read_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_BYTES_AT_ONCE = 2**24
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


class SafetensorsFolder:
    """A folder with `config.json` and `model.safetensors`, or shards with an index. Raises ModelLoadError if damaged.

    `where` is the folder's name in error messages; `fields` is the model's configuration. Files are memory-mapped, and
    unmapped every few megabytes, so that loading never needs much more memory than the weights.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self.fields = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
        self._file_of = self._find(folder)
        layers = self.fields.optional_integer("num_hidden_layers") or 0
        if layers > len(self._file_of):
            raise ModelLoadError(f"{folder}: {layers} layers in config.json, but only {len(self._file_of)} tensors.")

    def difference(self, expected: set[str]) -> tuple[set[str], set[str]]:
        """Return the `expected` tensors that are missing, and the existing tensors that are not expected."""
        return expected - self._file_of.keys(), self._file_of.keys() - expected

    def shape(self, name: str) -> tuple[int, ...]:
        with _opened(self._file_of[name]) as weights:
            return tuple(weights.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the type that a tensor is stored in; float32 for types that the engine does not compute in."""
        with _opened(self._file_of[name]) as weights:
            return _DTYPES.get(weights.get_slice(name).get_dtype(), torch.float32)

    def copy_into(self, name: str, target: Tensor) -> None:
        """Copy a tensor into `target`, which has the same shape, converting to its dtype."""
        rows = max(1, _BYTES_AT_ONCE * len(target) // max(1, target.numel() * 4))
        for start in range(0, len(target), rows):
            with _opened(self._file_of[name]) as weights:
                target[start : start + rows].copy_(weights.get_slice(name)[start : start + rows])

    def _find(self, folder: Path) -> dict[str, Path]:
        if (folder / _SINGLE).is_file():
            return dict.fromkeys(_names(folder / _SINGLE), folder / _SINGLE)
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
        return {name: folder / shard for shard in sorted(shards) for name in _names(folder / shard)}


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    """Memory-map a safetensors file. Raises ModelLoadError instead of the errors of safetensors."""
    try:
        with safe_open(path, framework="pt") as weights:
            yield weights
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged or not a safetensors file: {error}") from error


def _names(path: Path) -> list[str]:
    with _opened(path) as weights:
        return list(weights.keys())
