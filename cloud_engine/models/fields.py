"""Typed access to a `config.json`; every error names the file and the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ...protocol.errors import ModelLoadError
from ...protocol.unicode_forms import read_text

_MAX_NUMBER = 1e38  # largest accepted number; excludes infinity


class Fields:
    """The values of a model configuration; `where` is its name in error messages. All readers raise ModelLoadError.

    A null value counts as missing, as in Hugging Face.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self.where = where

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if value is None:
            raise ModelLoadError(f"{self.where}: {key} is missing.")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelLoadError(f"{self.where}: {key} must be a positive integer, got {value!r}.")
        return value

    def number(self, key: str, default: float) -> float:
        number = self.optional_number(key)
        return default if number is None else number

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if key in self.values else None

    def optional_number(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not -_MAX_NUMBER <= value <= _MAX_NUMBER:
            raise ModelLoadError(f"{self.where}: {key} must be a number, got {value!r}.")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise ModelLoadError(f"{self.where}: {key} must be true or false, got {value!r}.")
        return value

    def strings(self, key: str) -> list[str] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in cast("list[Any]", value)):
            raise ModelLoadError(f"{self.where}: {key} must be a list of strings, got {value!r}.")
        return cast("list[str]", value)

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise ModelLoadError(f"{self.where}: {key} must be an object, got {value!r}.")
        return cast("dict[str, Any]", value)

    def only(self, key: str, *supported: Any) -> None:
        """Raise ModelLoadError unless the value is one of `supported`, the first of which is the default."""
        value = self.values.get(key, supported[0])
        if value not in supported:
            raise ModelLoadError(
                f"{self.where}: {key}={value!r} is not supported; supported: {', '.join(map(repr, supported))}."
            )


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`. Raises ModelLoadError if the file is missing, unreadable or not an object."""
    try:
        value = json.loads(read_text(path, ModelLoadError))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} does not exist. Use a Hugging Face style model folder.") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must contain a JSON object.")
    return cast("dict[str, Any]", value)
