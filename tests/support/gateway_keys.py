"""Keys for gateways under test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from updraft.cloud_engine.gateway import KeyDatabase, NewKey


def make_key(path: Path, name: str, *scopes: Any, **options: Any) -> str:
    """Return a new key in the database at `path`, created if missing. The default scope is inference."""
    _, key = KeyDatabase(path).create(NewKey(name, scopes=scopes or ("inference",), **options), "test")
    return key
