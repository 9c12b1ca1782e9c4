"""The floor plan: what may import what, how long a file may be, and what a light import must not load."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from import_graph import FLOORS, ROOT, Import, imports_of, sources

# Drawn sideways: the command line shows the benchmarks.
SIDEWAYS = {("cli", "bench")}
MAX_LINES = 600
HEAVY = {
    "gateway": ("updraft.cloud_engine.gateway", {"torch", "llama_cpp", "transformers", "sklearn"}),
    "node": ("updraft.cloud_engine.node", {"torch", "llama_cpp", "transformers", "sklearn", "numpy"}),
    "sdk": ("updraft.sdk", {"torch", "llama_cpp", "transformers", "sklearn"}),
    "router": ("updraft.router", {"torch", "llama_cpp", "transformers", "sklearn"}),
    "cli": ("updraft.cli.main", {"torch", "llama_cpp", "transformers", "sklearn", "onnxruntime", "openai", "numpy"}),
    "updraft": (
        "updraft",
        {"torch", "llama_cpp", "transformers", "sklearn", "onnxruntime", "openai", "httpx", "numpy"},
    ),
}


def test_a_room_imports_only_from_floors_below() -> None:
    assert violations(import_ for path in sources() for import_ in imports_of(path)) == []


def test_every_room_has_a_floor() -> None:
    no_rooms = {"tests", "examples", "build", "dist", "out"}
    folders = {path.name for path in ROOT.glob("[!._]*") if next(path.rglob("*.py"), None)}
    assert folders - no_rooms == set(FLOORS)


def violations(found: Iterator[Import]) -> list[str]:
    wrong: list[str] = []
    for import_ in found:
        here, there = import_.rooms
        if here not in FLOORS or there not in FLOORS or here == there:
            continue
        if FLOORS[there] >= FLOORS[here] and (here, there) not in SIDEWAYS:
            wrong.append(f"{import_.where}: {import_.source} imports {import_.target}")
    return wrong


def test_the_rule_finds_a_violation() -> None:
    upwards = Import("protocol.errors", "router.config", "protocol/errors.py:1")
    sideways = Import("bench.shared.report", "cli.main", "bench/shared/report.py:1")
    allowed = Import("cli.bench", "bench.shared.report", "cli/bench.py:1")
    assert len(violations(iter([upwards, sideways, allowed]))) == 2


def test_the_imports_are_seen() -> None:
    imported = {import_.rooms for path in sources() for import_ in imports_of(path)}
    assert {("cli", "protocol"), ("cli", "bench"), ("sdk", "router")} <= imported


def test_ray_is_imported_where_the_extra_is_needed_only() -> None:
    """By the deployments when they are loaded, and by functions that say what is missing."""
    found: set[str] = set()
    for path in sources():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found |= {path.name for name in names if name.partition(".")[0] == "ray"}
    assert found == {"ray_deployments.py"}


def test_our_own_modules_are_imported_relatively() -> None:
    assert [import_.where for path in sources() for import_ in imports_of(path) if import_.is_absolute] == []


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_says_why_it_exists_and_stays_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), "a file starts with a docstring"
    assert len(text.splitlines()) <= MAX_LINES


def test_no_package_marker_where_it_would_shadow_others() -> None:
    # A regular package called kernels on sys.path hides the one transformers looks for.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()


@pytest.mark.parametrize("name", HEAVY)
def test_a_light_room_stays_light(name: str) -> None:
    module, heavy = HEAVY[name]
    submodules = (
        ""
        if name in ("updraft", "cli")
        else (
            "import pkgutil; [importlib.import_module(found.name) for found in"
            f" pkgutil.walk_packages(sys.modules['{module}'].__path__, '{module}.')"
            " if not found.name.endswith('__main__')];"
        )
    )
    program = f"import importlib, sys; importlib.import_module('{module}'); {submodules} print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT, env=environment()
    )
    assert heavy & {line.partition(".")[0] for line in done.stdout.split()} == set()


def environment() -> dict[str, str]:
    """The folder from which `updraft` can be imported, however the tests were started."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / ".typing"), os.environ.get("PYTHONPATH")])),
    }
