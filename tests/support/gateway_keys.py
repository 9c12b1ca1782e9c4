"""Keys for gateways under test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from updraft.cloud_engine.gateway import KeyDatabase, NewKey


def make_key(path: Path, name: str, *scopes: Any, **options: Any) -> str:
    """A key in the database at `path`, which is made if there is none. Without scopes it is for inference."""
    _, key = KeyDatabase(path).create(NewKey(name, scopes=scopes or ("inference",), **options), "test")
    return key
