"""Narrowing of decoded JSON from outside to a checked type."""

from __future__ import annotations

from typing import Any, cast


def table(value: Any) -> dict[str, Any] | None:
    """Return `value` if it is a JSON object, else None."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def rows(value: Any) -> list[Any] | None:
    """Return `value` if it is a JSON array, else None."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def tables(value: Any) -> list[dict[str, Any]] | None:
    """Return `value` if it is a JSON array of objects, else None."""
    items = rows(value)
    if items is None or not all(isinstance(item, dict) for item in items):
        return None
    return cast("list[dict[str, Any]]", items)
