"""Default sampling values in a model's files: `general.sampling.*` in GGUF, or `generation_config.json`.

Missing values are set to llama.cpp's defaults (`SamplingDefaults`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ..protocol.errors import InvalidRequestError, ModelLoadError
from ..protocol.sampling import SamplingDefaults, SamplingParams
from .gguf_reader import read_header

_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def default_sampling(model: Path) -> SamplingDefaults:
    """Read the defaults of a folder or of a GGUF file. Raises ModelLoadError."""
    return folder_sampling(model) if model.is_dir() else gguf_sampling(read_header(model).metadata, str(model))


def gguf_sampling(metadata: Mapping[str, Any], where: str) -> SamplingDefaults:
    """Read the defaults in a GGUF file's metadata. Raises ModelLoadError for invalid values."""
    return _checked({name: metadata.get(key) for name, key in _GGUF_KEYS.items()}, where)


def folder_sampling(folder: Path) -> SamplingDefaults:
    """Read the defaults in `generation_config.json`; `"do_sample": false` means greedy. Raises ModelLoadError."""
    path = folder / "generation_config.json"
    try:
        raw: object = json.loads(path.read_text(encoding="utf-8-sig")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{path} must hold a JSON object.")
    values = cast("dict[str, Any]", raw)
    if values.get("do_sample") is False:
        values = values | {"temperature": 0.0}
    return _checked({name: values.get(name) for name in SamplingDefaults.__dataclass_fields__}, str(path))


def _checked(given: Mapping[str, Any], where: str) -> SamplingDefaults:
    values = {name: value for name, value in given.items() if value is not None}
    for name, value in values.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole and (name == "top_k" or not isinstance(value, float)):
            kind = "a whole number" if name == "top_k" else "a number"
            raise ModelLoadError(f"{where}: {name} must be {kind}, got {value!r}.")
    if values.get("top_k", 0) < 0:  # a negative value means off in Hugging Face and llama.cpp
        values["top_k"] = 0
    try:
        SamplingParams(**values)
    except InvalidRequestError as error:
        raise ModelLoadError(f"{where}: {error.message}") from error
    return SamplingDefaults(**values)
