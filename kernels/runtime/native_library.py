"""Builds and loads the C sources in `kernels/native/`, once, with the machine's compiler and for its processor.

Without a working compiler, the plain torch implementations run, and `load` logs why.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...protocol.safety.private_files import private_folder
from ...protocol.safety.system import forbids_execution, is_owned_by_user
from ...protocol.settings import state_folder

_SOURCES = Path(__file__).parents[1] / "native"
_COMPILE_S = 600  # seconds, for slow and busy machines
_STALE_S = 3600
#: Vector length in native/vectors.h. The sizes of rows and heads must be multiples of this number.
LANES = 16
_LOG = logging.getLogger(__name__)


class NativeBuildError(Exception):
    """The kernels cannot be compiled or loaded on this machine."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the library, building it first if necessary; None if that fails, which is logged once."""
    try:
        return load_from(_SOURCES)
    except NativeBuildError as error:
        _LOG.warning("No native CPU kernels; using plain torch instead: %s", error)
        return None


def loaded() -> ctypes.CDLL:
    """Return the library, whose availability the caller must have checked."""
    library = load()
    assert library is not None, "check that the native library is available before calling it"
    return library


def call_fields(pointers: str = "", integers: str = "", doubles: str = "") -> tuple[tuple[str, Any], ...]:
    """Return the fields of a C structure by name: pointers, then 64-bit integers, then doubles."""
    kinds = ((pointers, ctypes.c_void_p), (integers, ctypes.c_int64), (doubles, ctypes.c_double))
    return tuple((name, kind) for names, kind in kinds for name in names.split())


def load_from(sources: Path) -> ctypes.CDLL:
    """Return the library of all C sources in the folder `sources`, building it first if necessary.

    Raises NativeBuildError if the library cannot be built or loaded.
    """
    problems: list[str] = []
    for compiler in _compilers():
        try:
            return _build_and_load(compiler, sources)
        except (NativeBuildError, OSError) as error:
            problems.append(str(error))
    raise NativeBuildError("; ".join(problems) or "no C compiler found (set CC, or install gcc)")


def _build_and_load(compiler: list[str], sources: Path) -> ctypes.CDLL:
    """Return the library; if it cannot be cached, compile it for this process. Raises NativeBuildError or OSError."""
    name = f"kernels-{_digest(compiler, sources)}.so"
    try:
        return _load_cached(compiler, _private_folder(state_folder() / "native") / name, sources)
    except OSError as error:
        _LOG.warning("Compiling for this process only, because the library cannot be cached: %s.", error)
    folder = Path(tempfile.mkdtemp(prefix="updraft-native-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    build(compiler, folder / name, sources)
    try:
        return ctypes.CDLL(str(folder / name))
    except OSError as error:
        raise NativeBuildError(
            f"the compiled library does not load (is {folder.parent} mounted noexec?): {error}"
        ) from error


def _load_cached(compiler: list[str], target: Path, sources: Path) -> ctypes.CDLL:
    """Return the cached library, building it first if necessary. Raises NativeBuildError, or OSError for the cache."""
    _remove_stale_builds(target.parent)
    if _is_intact(target):
        try:
            return ctypes.CDLL(str(target))
        except OSError:  # built on another machine that only looked like this one
            target.unlink(missing_ok=True)
    build(compiler, target, sources)
    return ctypes.CDLL(str(target))


def _private_folder(folder: Path) -> Path:
    """Return a folder that only this user can write to, as its libraries are executed. Raises OSError if impossible."""
    private_folder(folder.parent)
    folder.mkdir(exist_ok=True, mode=0o700)
    if not is_owned_by_user(folder):
        raise PermissionError(f"{folder} belongs to another user")
    if folder.stat().st_mode & 0o022 and os.name != "nt":
        _discard(folder)
        folder.mkdir(mode=0o700)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} is not writable")
    if forbids_execution(folder):
        raise PermissionError(f"{folder} is mounted noexec (set UPDRAFT_HOME to a folder that is not)")
    return folder


def _discard(folder: Path) -> None:
    """Delete a folder in which others may have planted libraries. Renaming it first hides its files at once."""
    _LOG.warning("Other users could write to %s, so its contents are deleted and built again.", folder)
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}-discarded-", dir=folder.parent))
    folder.rename(aside / folder.name)
    shutil.rmtree(aside, ignore_errors=True)


def _remove_stale_builds(folder: Path) -> None:
    """Remove the folders of killed builds, recognized by their age: a build takes minutes at most."""
    for build in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # deleted by a build that has just ended
            if build.is_dir() and time.time() - build.stat().st_mtime > _STALE_S:
                shutil.rmtree(build, ignore_errors=True)


def build(compiler: list[str], target: Path, origin: Path) -> None:
    """Compile all sources in `origin` into the shared library `target`. Raises NativeBuildError if that fails.

    OpenMP is not linked: torch has loaded its own, and two copies would compete for the processors.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        sources = sorted(origin.glob("*.c"))
        if not sources:
            raise NativeBuildError(f"there are no C sources in {origin}: install the package again")
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        commands = [
            [*compiler, *_flags(), "-c", str(source), "-o", compiled]
            for source, compiled in zip(sources, objects, strict=True)
        ]
        _LOG.info("Compiling %d C files for this processor; this happens once.", len(sources))
        with ThreadPoolExecutor() as executor:
            list(executor.map(_run, commands))
        library = Path(folder) / target.name
        _run([*compiler, "-shared", *objects, "-lm", "-o", str(library)])
        mark = Path(folder) / "mark"
        mark.write_text(_checksum(library))
        for built in (library, mark):
            built.chmod(0o600)
        library.replace(target)  # atomic, as other processes may load the file now
        mark.replace(_checksum_file(target))


def _checksum_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _is_intact(library: Path) -> bool:
    """Return whether the file is as it was built. A truncated library would load, and crash the process later."""
    try:
        return _checksum_file(library).read_text() == _checksum(library)
    except OSError:
        return False


def _flags() -> list[str]:
    flags = ["-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
    if platform.machine() in ("x86_64", "AMD64"):
        return [*flags, "-march=native", "-mprefer-vector-width=512"]
    return [*flags, "-mcpu=native"]


def _compilers() -> list[list[str]]:
    """Return the compilers on this machine, with arguments: `CC`, Python's own compiler, and the usual names."""
    compilers: list[list[str]] = []
    for candidate in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "gcc", "cc", "clang"):
        try:
            words = shlex.split(candidate or "")
        except ValueError:
            _LOG.warning("Ignoring the compiler %r: a quotation mark is missing.", candidate)
            continue
        path = shutil.which(words[0]) if words else None
        if path is not None and [path, *words[1:]] not in compilers:
            compilers.append([path, *words[1:]])
    return compilers


def _digest(compiler: list[str], origin: Path) -> str:
    """Return a digest of sources, compiler, flags and processor, because machines may share a home folder."""
    parts = [*compiler, *_flags(), _processor()]
    parts += [source.read_text() for source in sorted(origin.iterdir()) if source.suffix in (".c", ".h")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    description = Path("/proc/cpuinfo")
    lines = description.read_text().splitlines() if description.exists() else [platform.processor()]
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise NativeBuildError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    import torch  # noqa: F401 - the library uses torch's OpenMP

    load()
