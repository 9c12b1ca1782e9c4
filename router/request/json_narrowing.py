"""Other people's JSON: narrow what may be anything, without assuming a shape it may not have."""

from __future__ import annotations

from typing import Any, cast


def table(value: Any) -> dict[str, Any] | None:
    """`value` if it is a JSON object."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def rows(value: Any) -> list[Any] | None:
    """`value` if it is a JSON array."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def tables(value: Any) -> list[dict[str, Any]] | None:
    """`value` if it is a JSON array of objects."""
    found = rows(value)
    if found is None or not all(isinstance(item, dict) for item in found):
        return None
    return cast("list[dict[str, Any]]", found)
