"""Only nodes run a compiler: an app's process, with SDK, router or local engine, never starts one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
APP_PACKAGES = ("sdk", "router", "local_engine")
BUILDER = "kernels.runtime.native_library"
COMPILERS = ("cc", "gcc", "c++", "g++", "clang", "clang++")
#: A separate program that builds llama.cpp at installation; the package only imports its constants.
INSTALLER = "local_engine/llama/build.py"
APP = """
import sys
import updraft.router, updraft.sdk
from updraft.embedded.pocket import pocket_small_gguf
from updraft.local_engine.build_check import ensure_usable_build
from updraft.local_engine.engine import LocalEngine
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingParams
ensure_usable_build(pocket_small_gguf())
with LocalEngine.load(pocket_small_gguf()) as engine:
    run = engine.start([Message(role="user", content="Hello")], SamplingParams(max_tokens=8, temperature=1.0, seed=0))
    print(sum(1 for _ in run))
"""


def test_generation_in_an_app_starts_no_compiler(tmp_path: Path) -> None:
    calls = fake_compilers(tmp_path / "bin")
    environ = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / ".typing"), os.environ.get("PYTHONPATH")])),
        "UPDRAFT_HOME": str(tmp_path / "home"),  # a fresh folder: no compiled kernels
        "CC": str(tmp_path / "bin" / "cc"),
        "CXX": str(tmp_path / "bin" / "c++"),
    }
    done = subprocess.run([sys.executable, "-c", APP], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
    assert calls.read_text() == ""


def test_fake_compilers_log_their_calls(tmp_path: Path) -> None:
    calls = fake_compilers(tmp_path)
    subprocess.run(["cc", "-c", "some.c"], env={**os.environ, "PATH": str(tmp_path)}, check=False)
    assert calls.read_text() == "cc -c some.c\n"


def test_app_packages_do_not_import_the_native_builder() -> None:
    """Direct, indirect and function-level imports are followed."""
    wanted = [name for name in MODULES if name.split(".")[0] in APP_PACKAGES]
    reached: dict[str, str] = dict.fromkeys(wanted, "")
    while wanted:
        name = wanted.pop()
        for target in imported(name):
            if target not in reached:
                reached[target] = name
                wanted.append(target)
    assert BUILDER in MODULES
    assert BUILDER not in reached, f"imported by {reached.get(BUILDER)}"


def test_app_packages_name_no_compiler() -> None:
    naming = [
        f"{shown(path)}:{node.lineno}"
        for name, path in MODULES.items()
        if name.split(".")[0] in APP_PACKAGES and shown(path) != INSTALLER
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in (*COMPILERS, "CC", "CXX")
    ]
    assert naming == []


def fake_compilers(folder: Path) -> Path:
    """Create compilers in `folder` that log their arguments and fail. Return the log file."""
    calls = folder / "calls"
    folder.mkdir(exist_ok=True)
    calls.touch()
    for name in COMPILERS:
        program = folder / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> "{calls}"\nexit 1\n')
        program.chmod(0o755)
    return calls


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def modules() -> dict[str, Path]:
    """Map each module's name, without the leading `updraft`, to its file."""
    files: dict[str, Path] = {}
    for top in ROOT.iterdir():
        if top.name.startswith(".") or top.name in ("tests", "build", "dist", "out"):
            continue
        for path in [top] if top.suffix == ".py" else top.rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(part for part in parts if part != "__init__")] = path
    return files


def imported(name: str) -> Iterator[str]:
    """Yield the modules of the package that a module imports."""
    path = MODULES[name]
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            for alias in node.names:
                for target in (".".join(filter(None, [*base, alias.name])), ".".join(filter(None, base))):
                    if target in MODULES:
                        yield target


MODULES = modules()
