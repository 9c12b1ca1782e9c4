"""The wheel holds one top-level package with every subpackage, the weights, native sources and web page only."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_PACKAGES = {"tests", "docs", "examples", "build", "dist", "out"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the source archive and the wheel, built from a copy so that the tree gets no build folder."""
    copy = tmp_path_factory.mktemp("tree") / "updraft"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "out")
    )
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> list[str]:
    """The names of the wheel's files."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        names = archive.namelist()
        top_level = next(name for name in names if name.endswith("top_level.txt"))
        assert archive.read(top_level).decode().split() == ["updraft"]
    return names


def test_every_package_is_included(wheel: list[str]) -> None:
    folders = {path.parent.relative_to(ROOT) for path in ROOT.rglob("*.py")}
    packages = {
        folder.as_posix()
        for folder in folders
        if folder.parts and folder.parts[0] not in NOT_PACKAGES and not any(p.startswith(".") for p in folder.parts)
    }
    shipped = {Path(name).parent.relative_to("updraft").as_posix() for name in wheel if name.endswith(".py")}
    assert packages
    assert packages <= shipped


def test_every_module_is_included(wheel: list[str]) -> None:
    for package in (path for path in ROOT.iterdir() if path.is_dir() and path.name not in NOT_PACKAGES):
        if package.name.startswith(".") or package.name == "__pycache__":
            continue
        missing = {f"updraft/{path.relative_to(ROOT).as_posix()}" for path in package.rglob("*.py")} - set(wheel)
        assert missing == set()


def test_the_weights_are_included(wheel: list[str]) -> None:
    weights = ROOT / "embedded" / "weights"
    files = {f"updraft/{path.relative_to(ROOT).as_posix()}" for path in weights.rglob("*") if path.is_file()}
    assert "updraft/embedded/weights/pocket-small.gguf" in files
    assert files <= set(wheel)


def test_the_native_kernels_for_llama_cpp_are_included(wheel: list[str]) -> None:
    kernels = ROOT / "local_engine" / "llama" / "native" / "ggml"
    files = {f"updraft/{path.relative_to(ROOT).as_posix()}" for path in kernels.iterdir()}
    assert "updraft/local_engine/llama/native/ggml/kernels.cmake" in files
    assert files <= set(wheel)


def test_the_web_page_is_included(wheel: list[str]) -> None:
    files = {f"updraft/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("router/server/page/static/*")}
    assert "updraft/router/server/page/static/index.html" in files
    assert files <= set(wheel)


def test_wheel_is_typed_and_has_no_stray_files(wheel: list[str]) -> None:
    assert "updraft/py.typed" in wheel
    # Every module in the repository root becomes part of the package.
    roots = {Path(name).parts[1] for name in wheel if len(Path(name).parts) == 2 and name.startswith("updraft/")}
    assert roots == {"__init__.py", "__main__.py", "py.typed"}
    assert not [name for name in wheel if "/tests/" in name or name.startswith("tests/")]


def test_twine_accepts_both_files(built: Path) -> None:
    files = sorted(map(str, built.iterdir()))
    assert len(files) == 2
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2
