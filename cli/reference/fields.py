"""Fields of a dataclass, each documented by the comment above it, for the reference pages."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class FieldEntry:
    """Documentation of one field."""

    name: str
    # Type as written in the source.
    kind: str
    # Default as a user would write it; empty for no default.
    default: str
    # Comment above the field.
    text: str


def entries(kind: type[Any]) -> list[FieldEntry]:
    """Return every field of the dataclass `kind`, in order. Raises ValueError for a field without a comment."""
    comments = {name: text for base in reversed(kind.__mro__) if is_dataclass(base) for name, text in _comments(base)}
    return [
        FieldEntry(item.name, str(item.type), _default(item.default, item.default_factory), comments[item.name])
        for item in fields(kind)
    ]


def _comments(kind: type[Any]) -> Iterator[tuple[str, str]]:
    lines = inspect.getsource(kind).splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    tree = ast.parse("\n".join(line[indent:] for line in lines)).body[0]
    assert isinstance(tree, ast.ClassDef), "source of a class parses as one class"
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = _comment_above(lines, node.lineno - 2)
            if not text:
                raise ValueError(f"{kind.__name__}.{node.target.id} has no comment: write one above the field.")
            yield node.target.id, text


def _comment_above(lines: list[str], last: int) -> str:
    """Return the comment that ends in line `last`; empty if this line is not a comment."""
    words: list[str] = []
    while lines[last].lstrip().startswith("#"):
        words.insert(0, lines[last].lstrip().removeprefix("#").strip())
        last -= 1
    return " ".join(words)


def _default(value: object, factory: object) -> str:
    if value is not MISSING and value is not None:
        return _written(value)
    if factory is MISSING or value is None:
        return ""
    default: object = cast(Any, factory)()
    return "" if isinstance(default, float) else _written(default)  # a timestamp is not a useful default


def _written(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str() | Path():
            return f'"{value}"'
        case int() | float():
            return str(value)
        case _:
            return ""
