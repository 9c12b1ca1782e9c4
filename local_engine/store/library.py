"""The folder of models: what is in it, what each should be, and the one who may write at a time.

models/NAME.gguf  NAME.json      a model and its manifest
models/.partial/  models/.locks/ what is under way, and by whom
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ...model_files.download.naming import check_name, is_name, is_path
from ...model_files.download.part import PartialFile, lock, read_note
from ...model_files.download.work import ProgressReport
from ...protocol.decoding import prepare_types, read_kept
from ...protocol.errors import ModelNotFoundError
from ...protocol.safety.private_files import has_file, prepared
from ...protocol.safety.system import open_folder
from ...protocol.settings import models_folder

_BLOCK = 1024 * 1024
State = Literal["ready", "partial", "damaged", "missing"]


class Manifest(msgspec.Struct, frozen=True):
    """The record of a pulled model."""

    name: str
    source: str
    size: int
    # Of the bytes that arrived.
    sha256: str
    # Whether the source published that checksum.
    published: bool
    # Time in UTC.
    pulled_at: str
    licence: str | None = None
    identity: str | None = None
    revision: str | None = None


prepare_types(Manifest)


@dataclass(frozen=True, slots=True)
class LibraryEntry:
    """A line of the list."""

    name: str
    state: State
    # Bytes on the disk.
    size: int
    source: str
    # None where the model is not complete or its manifest cannot be read.
    manifest: Manifest | None = None


class Library:
    """Models by name. Many processes may use it at once."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` None: the user's own."""
        self.folder = models_folder() if folder is None else folder
        self.partial = self.folder / ".partial"

    def path(self, name: str) -> Path:
        """The file of a model of that name, there or not. Raises InvalidRequestError for what cannot be a name."""
        return self.folder / f"{check_name(name)}.gguf"

    def find(self, name: str) -> Manifest | None:
        """The manifest of a complete model, or None if the model is missing. Raises InvalidRequestError."""
        return read_kept(self._manifest(name), Manifest) if has_file(self.path(name)) else None

    def entries(self) -> list[LibraryEntry]:
        """All there is, by name, with what is under way. Files that no model could be called after are not ours."""
        models = {path.stem: path for path in self._glob(self.folder, "*.gguf")}
        manifests = {path.stem for path in self._glob(self.folder, "*.json")}
        under_way = {path.stem: path for path in self._glob(self.partial, "*.part")}
        found = [self._entry(name, path) for name, path in models.items()]
        found += [LibraryEntry(name, "missing", 0, "") for name in manifests - models.keys() - under_way.keys()]
        for name, path in under_way.items():
            note = read_note(self.partial, name)
            found.append(LibraryEntry(name, "partial", path.stat().st_size, "" if note is None else note.source))
        return sorted(found, key=lambda entry: (entry.name, entry.state))

    def remove(self, name: str) -> int:
        """Delete a model and what is under way of it; the bytes that this frees.

        Raises ModelNotFoundError; OverloadedError while somebody pulls it.
        """
        files = [self.path(name), self._manifest(name), self.partial / f"{name}.part", self.partial / f"{name}.json"]
        if not any(path.exists() for path in files):
            raise self.unknown(name)
        with self.lock(name):
            freed = sum(path.stat().st_size for path in files if path.exists())
            for path in files:
                path.unlink(missing_ok=True)
        return freed

    def verify(self, name: str, report: ProgressReport) -> State:
        """Read a model again and compare it with its manifest. Raises ModelNotFoundError, OSError."""
        path, manifest = self.path(name), self.find(name)
        if manifest is None:
            if path.exists():
                return "damaged"
            if self._manifest(name).exists():
                return "missing"
            raise self.unknown(name)
        digest, done = hashlib.sha256(), 0
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                done += len(block)
                report.progress(done, manifest.size)
        return "ready" if digest.hexdigest() == manifest.sha256 else "damaged"

    def keep(self, part: PartialFile, manifest: Manifest) -> Path:
        """Give a complete part its name, all at once. Raises OSError."""
        path = self.path(manifest.name)
        part.sync()
        # Without a manifest, a model counts as damaged and is fetched again: so whatever a crash leaves is never taken
        # for what it is not. The old manifest goes before its model is replaced, the new one comes after.
        temporary = self.partial / f"{manifest.name}.manifest"
        with prepared(temporary).open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest)))
            file.flush()
            os.fsync(file.fileno())
        self._manifest(manifest.name).unlink(missing_ok=True)
        self._sync_folder()
        part.path.replace(path)
        self._sync_folder()
        temporary.replace(self._manifest(manifest.name))
        part.discard()
        self._sync_folder()
        return path

    def _sync_folder(self) -> None:
        """Make renames durable, in this order, whatever happens to the machine."""
        if (folder := open_folder(self.folder)) is not None:
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def lock(self, name: str, waiting: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """Nobody else changes this model meanwhile: see `lock`."""
        return lock(self.folder, check_name(name), waiting)

    def unknown(self, name: str) -> ModelNotFoundError:
        names = ", ".join(entry.name for entry in self.entries()) or "no model at all"
        return ModelNotFoundError(f"There is no model {name!r} in {self.folder}. It holds {names}.")

    def _entry(self, name: str, path: Path) -> LibraryEntry:
        size, manifest = path.stat().st_size, read_kept(self._manifest(name), Manifest)
        if manifest is None:
            return LibraryEntry(name, "damaged", size, "")
        return LibraryEntry(name, "ready" if manifest.size == size else "damaged", size, manifest.source, manifest)

    def _manifest(self, name: str) -> Path:
        return self.folder / f"{check_name(name)}.json"

    @staticmethod
    def _glob(folder: Path, pattern: str) -> list[Path]:
        try:
            found = list(folder.glob(pattern)) if folder.is_dir() else []
        except PermissionError:  # another user's
            return []
        return [path for path in found if is_name(path.stem) and path.is_file()]


def model_path(name: str) -> Path:
    """The file that `name` means where the local engine takes one: a model of the user's library, or else a path.

    Whoever opens the file reports a missing one. What is neither a model nor looks like a path is missing: a file of
    the working folder never stands for a name.
    """
    library = Library()
    if is_path(name) and not (is_name(name) and library.find(name)):
        return Path(name).expanduser()
    return library.folder / f"{name.replace('/', '-')}.gguf"
