"""Layers: packages import only from lower ones. Files have a docstring and a size limit; light imports stay light."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from import_graph import LAYERS, ROOT, Import, imports_of, sources

# Imports inside one layer that are allowed: the command line runs the benchmarks.
SAME_LAYER = {("cli", "bench")}
MAX_LINES = 600
#: Modules whose import must not load these libraries.
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


def test_packages_import_from_lower_layers_only() -> None:
    assert violations(import_ for path in sources() for import_ in imports_of(path)) == []


def test_every_package_has_a_layer() -> None:
    not_packages = {"tests", "examples", "build", "dist", "out"}
    folders = {path.name for path in ROOT.glob("[!._]*") if next(path.rglob("*.py"), None)}
    assert folders - not_packages == set(LAYERS)


def violations(imports: Iterator[Import]) -> list[str]:
    wrong: list[str] = []
    for import_ in imports:
        here, there = import_.packages
        if here not in LAYERS or there not in LAYERS or here == there:
            continue
        if LAYERS[there] >= LAYERS[here] and (here, there) not in SAME_LAYER:
            wrong.append(f"{import_.where}: {import_.source} imports {import_.target}")
    return wrong


def test_violations_are_found() -> None:
    upwards = Import("protocol.errors", "router.config", "protocol/errors.py:1")
    same_layer = Import("bench.shared.report", "cli.main", "bench/shared/report.py:1")
    allowed = Import("cli.bench", "bench.shared.report", "cli/bench.py:1")
    assert len(violations(iter([upwards, same_layer, allowed]))) == 2


def test_imports_are_read() -> None:
    imported = {import_.packages for path in sources() for import_ in imports_of(path)}
    assert {("cli", "protocol"), ("cli", "bench"), ("sdk", "router")} <= imported


def test_only_the_ray_deployments_import_ray_at_their_top() -> None:
    """Other modules import Ray inside functions whose error names the missing extra."""
    importers: set[str] = set()
    for path in sources():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            importers |= {path.name for name in names if name.partition(".")[0] == "ray"}
    assert importers == {"ray_deployments.py", "ray_machines.py"}


def test_imports_inside_the_package_are_relative() -> None:
    assert [import_.where for path in sources() for import_ in imports_of(path) if import_.is_absolute] == []


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_has_a_docstring_and_stays_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), "a file starts with a docstring"
    assert len(text.splitlines()) <= MAX_LINES


def test_folders_that_would_shadow_other_packages_have_no_init_file() -> None:
    # A regular package named kernels on sys.path hides the library that transformers imports under this name.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()


@pytest.mark.parametrize("name", HEAVY)
def test_light_imports_load_no_heavy_library(name: str) -> None:
    module, heavy = HEAVY[name]
    submodules = (
        ""
        if name in ("updraft", "cli")
        else (
            "import pkgutil; [importlib.import_module(each.name) for each in"
            f" pkgutil.walk_packages(sys.modules['{module}'].__path__, '{module}.')"
            " if not each.name.endswith('__main__')];"
        )
    )
    program = f"import importlib, sys; importlib.import_module('{module}'); {submodules} print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT, env=environment()
    )
    assert heavy & {line.partition(".")[0] for line in done.stdout.split()} == set()


def environment() -> dict[str, str]:
    """The environment with a PYTHONPATH from which `updraft` can be imported."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / ".typing"), os.environ.get("PYTHONPATH")])),
    }
