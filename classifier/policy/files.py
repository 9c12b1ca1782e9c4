"""Putting a policy into a folder: files named after what they hold, then the card that names them, in one step.

Nothing that is not of a policy is ever touched: the folder may be the user's own, with other things in it.
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
from ...protocol.safety.private_files import make_folder, prepared
from ...protocol.safety.system import locked, open_folder
from .graph_files import CARD_NAME, read_card, sha256

T = TypeVar("T")
log = logging.getLogger(__name__)
_PARTIAL = ".policy.partial"
_STORED = re.compile(r"(topics|gate\d|calibration)-([0-9a-f]{16})\.(onnx|npz)")


def stored_name(name: str, data: bytes) -> str:
    """`gate1.onnx` as it is stored: `gate1-<first 16 digits of its SHA-256>.onnx`."""
    path = Path(name)
    return f"{path.stem}-{sha256(data)[:16]}{path.suffix}"


def policy_folder(out: Path) -> Path:
    """`out`, absolute, wherever the process goes meanwhile. Raises InvalidRequestError if it is there and no folder."""
    folder = out.resolve()
    if folder.exists() and not folder.is_dir():
        raise InvalidRequestError(f"{folder} is a file: name a folder for the policy with --out.", param="out")
    return folder


def put_policy(folder: Path, files: Mapping[str, bytes], card: bytes) -> None:
    """Put `files`, under their `stored_name`s, and then the `card` that names them into `folder`.

    Until the card is replaced, what was there is in force and untouched; afterwards, what it named is removed. Two that
    write into one folder wait for each other. Raises InvalidRequestError if the folder cannot be written.
    """
    try:
        make_folder(folder)
        with _alone_in(folder):
            former = _named(folder)
            _replace(folder, files, card)
            _remove_former(folder, former, files)
    except OSError as error:
        raise InvalidRequestError(
            f"The policy cannot be written to {folder}: {error}. What was there is as it was. Make room, or name "
            "another folder with --out."
        ) from error


def settled(folder: Path, load: Callable[[Path], T]) -> T:
    """`load(folder)`, again while nobody writes if a policy was put there meanwhile. Raises what `load` raises."""
    card = _card(folder)
    try:
        return load(folder)
    except ConfigurationError:
        if _card(folder) == card:
            raise
    with _alone_in(folder):
        return load(folder)


def _card(folder: Path) -> tuple[int, int] | None:
    """The stamp of the card in force, also told from an equal one before it."""
    try:
        found = (folder / CARD_NAME).stat()
    except OSError:  # loading says what is wrong with it
        return None
    return found.st_ino, found.st_mtime_ns


def _named(folder: Path) -> dict[str, str]:
    """The files that the card in `folder` names, with their SHA-256; none where there is no card to be read."""
    try:
        return msgspec.convert(read_card(folder).get("files"), dict[str, str])
    except (ConfigurationError, msgspec.ValidationError):  # whatever it was, it is replaced
        return {}


def _replace(folder: Path, files: Mapping[str, bytes], card: bytes) -> None:
    """All of `files`, then the card. Where that is broken off, what was written for nothing is removed."""
    new = [name for name, data in files.items() if not _holds(folder / name, sha256(data))]
    try:
        for name in new:
            _write(folder / name, files[name])
        _write(folder / CARD_NAME, card)
    finally:
        in_force = _named(folder)
        for name in (_PARTIAL, *new):
            if name not in in_force:
                (folder / name).unlink(missing_ok=True)


def _remove_former(folder: Path, former: Mapping[str, str], files: Container[str]) -> None:
    """Files of earlier policies, also of writers that were killed. A name alone does not make a file one of them."""
    for path in sorted(folder.iterdir()):
        stored = _STORED.fullmatch(path.name)
        digest = former.get(path.name) or (stored and stored[2])
        try:
            if path.name not in files and digest and _holds(path, digest):
                path.unlink()
        except OSError as error:
            log.warning("a file of the former policy stays: %s", error)


def _holds(path: Path, digest: str) -> bool:
    """Whether it is a file with that SHA-256, of which `digest` may be the beginning."""
    return path.is_file() and sha256(path.read_bytes()).startswith(digest)


def _write(path: Path, data: bytes) -> None:
    """The whole file at once, and on the disk. Only one partial file, under one name, can ever be left behind."""
    partial = path.with_name(_PARTIAL)
    with prepared(partial).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@contextmanager
def _alone_in(folder: Path) -> Generator[None]:
    """Nobody else puts a policy into `folder` meanwhile. The system lifts the lock when a process dies."""
    handle = open_folder(folder)
    if handle is None:
        yield
        return
    try:
        with locked(handle):
            yield
    finally:
        os.close(handle)
