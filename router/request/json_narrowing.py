"""Type checks of decoded JSON that comes from clients or clouds."""

from __future__ import annotations

from typing import Any, cast

from ...protocol.http.lenient_json import json_of, object_of


def table(value: Any) -> dict[str, Any] | None:
    """Return `value` if it is a JSON object, else None."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def object_in(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in `raw`, or an empty object for anything else."""
    try:
        return object_of(json_of(raw))
    except ValueError:
        return {}


def rows(value: Any) -> list[Any] | None:
    """Return `value` if it is a JSON array, else None."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def tables(value: Any) -> list[dict[str, Any]] | None:
    """Return `value` if it is a JSON array of objects, else None."""
    items = rows(value)
    if items is None or not all(isinstance(item, dict) for item in items):
        return None
    return cast("list[dict[str, Any]]", items)
