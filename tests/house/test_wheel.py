"""The wheel: exactly one top-level package, every room in it, the weights with it, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_ROOMS = {"tests", "docs", "examples", "build", "dist", "out"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source archive, and a wheel from that, built from a copy of the tree: no build folder is left in it."""
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
    """The names in it."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        names = archive.namelist()
        top_level = next(name for name in names if name.endswith("top_level.txt"))
        assert archive.read(top_level).decode().split() == ["updraft"]
    return names


def test_every_room_of_the_tree_is_in_it(wheel: list[str]) -> None:
    folders = {path.parent.relative_to(ROOT) for path in ROOT.rglob("*.py")}
    rooms = {
        folder.as_posix()
        for folder in folders
        if folder.parts and folder.parts[0] not in NOT_ROOMS and not any(p.startswith(".") for p in folder.parts)
    }
    shipped = {Path(name).parent.relative_to("updraft").as_posix() for name in wheel if name.endswith(".py")}
    assert rooms
    assert rooms <= shipped


def test_every_module_is_in_it(wheel: list[str]) -> None:
    for room in (path for path in ROOT.iterdir() if path.is_dir() and path.name not in NOT_ROOMS):
        if room.name.startswith(".") or room.name == "__pycache__":
            continue
        missing = {f"updraft/{path.relative_to(ROOT).as_posix()}" for path in room.rglob("*.py")} - set(wheel)
        assert missing == set()


def test_the_weights_come_with_it(wheel: list[str]) -> None:
    weights = ROOT / "embedded" / "weights"
    files = {f"updraft/{path.relative_to(ROOT).as_posix()}" for path in weights.rglob("*") if path.is_file()}
    assert "updraft/embedded/weights/pocket-small.gguf" in files
    assert files <= set(wheel)


def test_what_is_linked_into_llama_cpp_comes_with_it(wheel: list[str]) -> None:
    kernels = ROOT / "local_engine" / "llama" / "native" / "ggml"
    files = {f"updraft/{path.relative_to(ROOT).as_posix()}" for path in kernels.iterdir()}
    assert "updraft/local_engine/llama/native/ggml/kernels.cmake" in files
    assert files <= set(wheel)


def test_the_page_comes_with_it(wheel: list[str]) -> None:
    files = {f"updraft/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("router/server/page/static/*")}
    assert "updraft/router/server/page/static/index.html" in files
    assert files <= set(wheel)


def test_it_is_typed_and_holds_nothing_stray(wheel: list[str]) -> None:
    assert "updraft/py.typed" in wheel
    # Any module beside __init__.py would ship as part of the package: there are no others.
    roots = {Path(name).parts[1] for name in wheel if len(Path(name).parts) == 2 and name.startswith("updraft/")}
    assert roots == {"__init__.py", "__main__.py", "py.typed"}
    assert not [name for name in wheel if "/tests/" in name or name.startswith("tests/")]


def test_an_index_would_take_both(built: Path) -> None:
    files = sorted(map(str, built.iterdir()))
    assert len(files) == 2
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2
