"""Imports between modules of the package, parsed from the source without importing a module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYERS = {
    "protocol": 1,
    "text": 2,
    "model_files": 2,
    "kernels": 3,
    "accounting": 3,
    "local_engine": 4,
    "classifier": 4,
    "cloud_engine": 4,
    "embedded": 5,
    "router": 6,
    "sdk": 7,
    "bench": 8,
    "cli": 8,
}


@dataclass(frozen=True)
class Import:
    """An import of module `target` by module `source`; both are dotted names without the leading `updraft`."""

    source: str
    target: str
    where: str
    is_absolute: bool = False

    @property
    def packages(self) -> tuple[str, str]:
        return self.source.partition(".")[0], self.target.partition(".")[0]


def sources() -> list[Path]:
    packages = [path for package in LAYERS for path in (ROOT / package).rglob("*.py")]
    return sorted([*packages, *ROOT.glob("*.py")])


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Return all imports of Updraft's modules in a file, including those in functions and in `if TYPE_CHECKING`."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[Import]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    source = ".".join(part for part in parts if part != "__init__")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ["updraft", *parts[: len(parts) - node.level], *((node.module or "").split("."))]
            names = [".".join([*filter(None, base), alias.name]) for alias in node.names]
        else:
            continue
        absolute = isinstance(node, ast.Import) or node.level == 0
        for name in names:
            if name == "updraft" or name.startswith("updraft."):
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield Import(source, name.removeprefix("updraft").removeprefix("."), where, absolute)
