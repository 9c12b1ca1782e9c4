"""Atomic replacement of a policy: write files named by their hash, then the card (`policy.json`) that names the files.

The folder may be the user's own and contain other files. Files that do not belong to a policy are never touched.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Container, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from ...protocol.errors import ConfigurationError, InvalidRequestError
from ...protocol.safety.private_files import file_version, make_folder, prepared
from ...protocol.safety.system import locked, open_folder
from .graph_files import CARD_NAME, read_card, sha256

T = TypeVar("T")
log = logging.getLogger(__name__)
_PARTIAL = ".policy.partial"
_STORED = re.compile(r"(topics|gate\d|calibration)-([0-9a-f]{16})\.(onnx|npz)")


def stored_name(name: str, data: bytes) -> str:
    """Return the stored name of a file: `gate1.onnx` becomes `gate1-<first 16 digits of its SHA-256>.onnx`."""
    path = Path(name)
    return f"{path.stem}-{sha256(data)[:16]}{path.suffix}"


def policy_folder(out: Path) -> Path:
    """Return `out` as an absolute path. Raises InvalidRequestError if `out` exists and is not a folder."""
    folder = out.resolve()
    if folder.exists() and not folder.is_dir():
        raise InvalidRequestError(f"{folder} is a file: name a folder for the policy with --out.", param="out")
    return folder


def put_policy(folder: Path, files: Mapping[str, bytes], card: bytes) -> None:
    """Write `files`, under their `stored_name`s, and then the `card` that names them, into `folder`.

    The old policy stays in force and untouched until the card is replaced; afterwards its files are removed. Concurrent
    writers wait for each other. Raises InvalidRequestError if the folder cannot be written.
    """
    try:
        make_folder(folder)
        with _lock_folder(folder):
            former = _named(folder)
            _replace(folder, files, card)
            _remove_replaced(folder, former, files)
    except OSError as error:
        raise InvalidRequestError(
            f"Cannot write the policy to {folder}: {error}. The old policy is unchanged. Free disk space, or name "
            "another folder with --out."
        ) from error


def settled(folder: Path, load: Callable[[Path], T]) -> T:
    """Return `load(folder)`; retry under the lock if a policy was written meanwhile. Raises the errors of `load`."""
    card = file_version(folder / CARD_NAME)
    try:
        return load(folder)
    except ConfigurationError:
        if file_version(folder / CARD_NAME) == card:
            raise
    with _lock_folder(folder):
        return load(folder)


def _named(folder: Path) -> dict[str, str]:
    """Return the files that the card in `folder` names, with their SHA-256; empty without a readable card."""
    try:
        return msgspec.convert(read_card(folder).get("files"), dict[str, str])
    except (ConfigurationError, msgspec.ValidationError):  # a damaged card names no files
        return {}


def _replace(folder: Path, files: Mapping[str, bytes], card: bytes) -> None:
    """Write all of `files`, then the card. If a write fails, the new files are removed."""
    new = [name for name, data in files.items() if not _matches_digest(folder / name, sha256(data))]
    try:
        for name in new:
            _write(folder / name, files[name])
        _write(folder / CARD_NAME, card)
    finally:
        in_force = _named(folder)
        for name in (_PARTIAL, *new):
            if name not in in_force:
                (folder / name).unlink(missing_ok=True)


def _remove_replaced(folder: Path, former: Mapping[str, str], files: Container[str]) -> None:
    """Remove files left by former policies or killed writers, if their content matches the digest on record."""
    for path in sorted(folder.iterdir()):
        stored = _STORED.fullmatch(path.name)
        digest = former.get(path.name) or (stored and stored[2])
        try:
            if path.name not in files and digest and _matches_digest(path, digest):
                path.unlink()
        except OSError as error:
            log.warning("cannot remove a file of the former policy: %s", error)


def _matches_digest(path: Path, digest: str) -> bool:
    """Return whether `path` is a file whose SHA-256 starts with `digest`."""
    return path.is_file() and sha256(path.read_bytes()).startswith(digest)


def _write(path: Path, data: bytes) -> None:
    """Write the file atomically and sync it to disk. A crash leaves at most one partial file, under a fixed name."""
    partial = path.with_name(_PARTIAL)
    with prepared(partial).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@contextmanager
def _lock_folder(folder: Path) -> Generator[None]:
    """Lock `folder` against other policy writers. The system releases the lock when a process dies."""
    handle = open_folder(folder)
    if handle is None:
        yield
        return
    try:
        with locked(handle):
            yield
    finally:
        os.close(handle)
