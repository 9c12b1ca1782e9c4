"""Other people's JSON: narrow what may be anything, without assuming a shape it may not have."""

from __future__ import annotations

from typing import Any, cast

import msgspec


def parsed(raw: bytes) -> Any:
    """The JSON in `raw`, after a byte order mark or without one. Raises ValueError if it is none, or nested deeper than
    anybody means.
    """
    try:
        return msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error


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
