"""The C kernels are built by the machine's own compiler, once, and are not needed where that fails."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from updraft.kernels.activation.ops import gated_activation
from updraft.kernels.activation.reference import gated_activation_reference
from updraft.kernels.norm.ops import add_rms_norm, rms_norm
from updraft.kernels.norm.reference import rms_norm_reference
from updraft.kernels.norm.types import Norm
from updraft.kernels.runtime import native_library
from updraft.kernels.runtime.native_library import NativeBuildError, build, load

SOURCES = sorted((Path(native_library.__file__).parents[1] / "native").rglob("*.c"))
needs_c = pytest.mark.skipif(load() is None, reason="no C compiler")
PROGRAM = """
import torch
from updraft.kernels.runtime.native_library import load
from updraft.kernels.activation.ops import gated_activation
print(load() is not None, tuple(gated_activation(torch.ones(2, 64), "silu").shape))
"""


SMALL_PROGRAM = """
import sys
from pathlib import Path
from updraft.kernels.runtime.native_library import load_from
print(load_from(Path(sys.argv[1])).answer())
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    """Sources that compile at once, for what is about building and not about the kernels."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.c").write_text("static const char some[4096] = {42};\nint answer(void) { return some[0]; }\n")
    return str(folder)


def run(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The kernels in a process of their own, or with `small` as an argument that."""
    return subprocess.run(
        [sys.executable, "-c", SMALL_PROGRAM if arguments else PROGRAM, *arguments],
        env={**os.environ, "UPDRAFT_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=True,
    )


@needs_c
def test_built_once_for_all_processes(tmp_path: Path, small: str) -> None:
    runs: list[subprocess.CompletedProcess[str]] = []
    threads = [threading.Thread(target=lambda: runs.append(run(tmp_path, small))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [done.stdout.strip() for done in runs] == ["42"] * 3
    (library,) = (tmp_path / "native").glob("*.so")
    assert {path.suffix for path in (tmp_path / "native").iterdir()} == {".so", ".sha256"}  # nothing half done
    written = library.stat().st_mtime_ns
    run(tmp_path, small)
    assert library.stat().st_mtime_ns == written


def test_plain_torch_where_nothing_compiles(tmp_path: Path) -> None:
    done = run(tmp_path, CC="/bin/false", PATH="/nonexistent")
    assert done.stdout.strip() == "False (2, 32)"
    assert "using plain torch instead" in done.stderr and "/bin/false" in done.stderr


@needs_c
@pytest.mark.parametrize("compiler", ["/bin/false", "gcc '", "env gcc", "/nonexistent/cc"])
def test_a_compiler_that_fails_is_not_the_last_one(tmp_path: Path, small: str, compiler: str) -> None:
    assert run(tmp_path, small, CC=compiler).stdout.strip() == "42"


@needs_c
def test_a_damaged_library_is_built_anew(tmp_path: Path, small: str) -> None:
    run(tmp_path, small)
    (library,) = (tmp_path / "native").glob("*.so")
    whole = library.read_bytes()
    for part in (0.0, 0.5, 0.9):
        library.write_bytes(whole[: int(part * len(whole))])
        assert run(tmp_path, small).stdout.strip() == "42"
        assert library.stat().st_size == len(whole)


@needs_c
def test_a_home_that_cannot_be_written_to(tmp_path: Path, small: str) -> None:
    home = tmp_path / "file"
    home.write_text("no folder")
    assert run(home, small).stdout.strip() == "42"


def test_a_folder_that_others_can_write_to_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "native"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "kernels-0.so").write_bytes(b"planted")
    (folder / "in the way").mkdir()
    native_library._private_folder(folder)
    assert folder.stat().st_mode & 0o077 == 0
    assert not list(folder.iterdir())
    assert list(tmp_path.iterdir()) == [folder]


def test_unremovable_library_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "native"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "kernels-0.so").write_bytes(b"planted")
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    for _ in range(2):
        assert not list(native_library._private_folder(folder).iterdir())


@needs_c
def test_builds_that_were_killed_leave_nothing_for_ever(tmp_path: Path, small: str) -> None:
    folders = [tmp_path / "native" / name for name in ("tmpold", "tmpnew")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "attention.o").write_bytes(b"half")
    (tmp_path / "native").chmod(0o700)
    os.utime(folders[0], (time.time() - 2 * 3600,) * 2)
    assert run(tmp_path, small).stdout.strip() == "42"
    assert [folder.exists() for folder in folders] == [False, True]


@needs_c
def test_a_folder_that_nothing_runs_from(
    tmp_path: Path, small: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where it is mounted noexec: the library is built, and then does not load."""
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    real = ctypes.CDLL

    def loaded(name: str, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
        if name.startswith(str(tmp_path)):
            raise OSError("failed to map segment from shared object")
        return real(name, mode)

    monkeypatch.setattr(ctypes, "CDLL", loaded)
    assert native_library.load_from(Path(small)).answer() == 42
    assert "failed to map segment" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_noexec_is_seen_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(PermissionError, match="mounted noexec"):
        native_library._private_folder(tmp_path / "native")


def test_a_library_that_does_not_load_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    monkeypatch.setattr(native_library, "build", lambda compiler, target, origin: target.write_bytes(b"no library"))
    with caplog.at_level(logging.WARNING):
        assert native_library.load.__wrapped__() is None
    assert "using plain torch instead" in caplog.text


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(NativeBuildError, match="/bin/false"):
        build(["/bin/false"], tmp_path / "kernels.so", SOURCES[0].parent)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not native_library._compilers(), reason="no C compiler")
def test_library_builds_with_a_compiler() -> None:
    assert load() is not None


@pytest.mark.skipif(not native_library._compilers(), reason="no C compiler")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_no_warnings(source: Path, tmp_path: Path) -> None:
    compiler = native_library._compilers()[0]
    # Functions that take vectors are inlined, so their calling convention without AVX-512 does not matter.
    flags = [*native_library._flags(), "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    subprocess.run([*compiler, *flags, "-c", str(source), "-o", str(tmp_path / "out.o")], check=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 16), (3, 192), (70, 896), (2, 40)])  # the last one is not for C
@pytest.mark.parametrize("unit_offset", [False, True])
def test_norms(shape: tuple[int, int], dtype: torch.dtype, unit_offset: bool) -> None:
    torch.manual_seed(0)
    wide = torch.randn(shape[0], 2 * shape[1]).to(dtype)
    hidden, residual = wide[:, : shape[1]], torch.randn(shape).to(dtype)
    norm = Norm(torch.randn(shape[1]).to(dtype), 1e-5, unit_offset)
    exact = {torch.float32: 2e-6, torch.bfloat16: 8e-3}[dtype]  # one unit in the last place
    torch.testing.assert_close(rms_norm(hidden, norm), rms_norm_reference(hidden, norm), rtol=exact, atol=1e-6)
    total = residual + hidden
    normed = add_rms_norm(hidden, residual, norm)
    assert torch.equal(residual, total)
    torch.testing.assert_close(normed, rms_norm_reference(total, norm), rtol=exact, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [16, 512, 40, 1352])
def test_gated(size: int, activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(50, 3 * size) * 8).to(dtype)[:, : 2 * size]
    gate_up[0, :8] = torch.tensor([0.0, -0.0, 80.0, -80.0, 3e38, -3e38, 1e-20, float("nan")], dtype=dtype)
    exact = {torch.float32: 5e-6, torch.bfloat16: 1.6e-2}[dtype]  # it is rounded twice
    # In float64, for torch's own tanh is off by 3e-6 in float32.
    expected = gated_activation_reference(gate_up.double(), activation).to(dtype)
    got = gated_activation(gate_up, activation)
    torch.testing.assert_close(got, expected, rtol=exact, atol=3e-6, equal_nan=True)
    alone = torch.cat([gated_activation(row[None], activation) for row in gate_up])
    torch.testing.assert_close(alone, got, rtol=0, atol=0, equal_nan=True)  # the same bits, whatever comes with it


def test_training_uses_torch() -> None:
    rows = torch.randn(2, 32, requires_grad=True)
    gated_activation(rows, "silu").sum().backward()
    assert rows.grad is not None


def test_a_folder_without_c_builds_no_empty_library(tmp_path: Path) -> None:
    with pytest.raises(NativeBuildError, match="there are no C sources in"):
        build(native_library._compilers()[0], tmp_path / "kernels.so", tmp_path)
