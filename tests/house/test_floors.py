"""The floor plan: what may import what, how long a file may be, and what a light import must not load."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = {
    "protocol": 1,
    "text": 2,
    "kernels": 3,
    "local_engine": 4,
    "classifier": 4,
    "cloud_engine": 4,
    "embedded": 5,
    "router": 6,
    "sdk": 7,
    "bench": 8,
    "cli": 8,
}
# Drawn sideways: the command line is the face of the benchmarks.
SIDEWAYS = {("cli", "bench")}
# Inside the cloud each room has floors of its own; the gateway knows no engine, only the wire.
CLOUD_FLOORS = {"models": 1, "engine": 2, "node": 3, "gateway": 0}
# Inside the kernels: operations above what they run on; attention writes to the cache; a decoder is all of them.
KERNEL_FLOORS = {
    "runtime": 1,
    "kv_cache": 2,
    "norm": 2,
    "activation": 2,
    "linear": 2,
    "lora": 2,
    "sampling": 2,
    "attention": 3,
    "decoder": 4,
}
MOST_LINES = 600
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


@dataclass(frozen=True)
class Import:
    """`source` (dotted, below the package root) imports `target`; both without the leading `updraft`."""

    source: str
    target: str
    where: str

    @property
    def rooms(self) -> tuple[str, str]:
        return self.source.partition(".")[0], self.target.partition(".")[0]


def sources() -> list[Path]:
    rooms = [path for room in FLOORS for path in (ROOT / room).rglob("*.py")]
    return sorted([*rooms, *ROOT.glob("*.py")])


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of our own modules in a file, also those inside functions and `if TYPE_CHECKING`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    source = ".".join(part for part in parts if part != "__init__")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ["updraft", *parts[: len(parts) - node.level], *((node.module or "").split("."))]
            names = [".".join([*filter(None, base), alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            if name == "updraft" or name.startswith("updraft."):
                yield Import(source, name.removeprefix("updraft").removeprefix("."), where)


def test_a_room_imports_only_from_floors_below() -> None:
    assert violations(import_ for path in sources() for import_ in imports_of(path)) == []


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
    sideways = Import("bench.report", "cli.main", "bench/report.py:1")
    allowed = Import("cli.bench", "bench.report", "cli/bench.py:1")
    assert len(violations(iter([upwards, sideways, allowed]))) == 2


def test_the_imports_are_seen(tmp_path: Path) -> None:
    seen = {import_.rooms for path in sources() for import_ in imports_of(path)}
    assert {("cli", "protocol"), ("cli", "bench"), ("sdk", "router")} <= seen


def test_inside_the_cloud_imports_go_down() -> None:
    wrong: list[str] = []
    for import_ in (i for path in (ROOT / "cloud_engine").rglob("*.py") for i in imports_of(path)):
        here, there = import_.source.split("."), import_.target.split(".")
        if there[0] != "cloud_engine" or len(here) < 2 or len(there) < 2 or here[1] == there[1]:
            continue
        if CLOUD_FLOORS.get(there[1], 0) >= CLOUD_FLOORS[here[1]] or there[1] == "gateway":
            wrong.append(f"{import_.where}: {import_.source} imports {import_.target}")
    assert wrong == []


def test_inside_the_kernels_imports_go_down() -> None:
    """From folder to folder by `KERNEL_FLOORS`; inside an operation nothing imports `ops`, and `types` is a leaf."""
    wrong: list[str] = []
    for import_ in (i for path in (ROOT / "kernels").rglob("*.py") for i in imports_of(path)):
        here, there = import_.source.split("."), import_.target.split(".")
        if there[0] != "kernels" or len(here) < 3:
            continue
        if here[1] == there[1]:
            is_wrong = here[2] == "types" or there[2:3] == ["ops"]
        else:
            is_wrong = KERNEL_FLOORS[there[1]] >= KERNEL_FLOORS[here[1]] or there[2:3] == ["ops"]
        if is_wrong:
            wrong.append(f"{import_.where}: {import_.source} imports {import_.target}")
    assert wrong == []
    assert {folder.name for folder in (ROOT / "kernels").glob("[a-z]*/")} - {"native", "tuned"} == KERNEL_FLOORS.keys()


def test_our_own_modules_are_imported_relatively() -> None:
    absolute = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "updraft")
        or (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "updraft" for alias in node.names))
    ]
    assert absolute == []


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_says_why_it_exists_and_stays_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), "a file starts with a docstring"
    assert len(text.splitlines()) <= MOST_LINES


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


def test_import_updraft_takes_under_300_ms() -> None:
    """The best of five, so that a busy machine does not decide."""
    program = "import time; t = time.perf_counter(); import updraft; print(time.perf_counter() - t)"
    seconds = [
        float(
            subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env=environment()).stdout
        )
        for _ in range(5)
    ]
    assert min(seconds) < 0.3


def environment() -> dict[str, str]:
    """Where `updraft` is importable from, however the tests were started."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / ".typing"), os.environ.get("PYTHONPATH")])),
    }
