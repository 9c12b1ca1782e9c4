"""The folder of models, with a manifest for each, and locks so that only one process changes a model at a time.

models/NAME.gguf  NAME.json      a model and its manifest
models/.partial/  models/.locks/ unfinished downloads and their locks
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
from ...model_files.download.partial_file import PartialFile, lock, read_resume_record
from ...model_files.download.progress import ProgressReport
from ...protocol.decoding import prepare_types, read_kept
from ...protocol.errors import ModelNotFoundError
from ...protocol.safety.private_files import has_file, prepared
from ...protocol.safety.system import open_folder
from ...protocol.settings import models_folder

_BLOCK = 1024 * 1024
State = Literal["ready", "partial", "damaged", "missing"]


class Manifest(msgspec.Struct, frozen=True):
    """Record of a pulled model."""

    name: str
    source: str
    size: int
    # Checksum of the received bytes.
    sha256: str
    # Whether the source published the checksum.
    published: bool
    # Time of the pull, in UTC.
    pulled_at: str
    licence: str | None = None
    identity: str | None = None
    revision: str | None = None


prepare_types(Manifest)


@dataclass(frozen=True, slots=True)
class LibraryEntry:
    """A model, complete or not, as `updraft models` lists it."""

    name: str
    state: State
    # Size on disk in bytes.
    size: int
    source: str
    # None if the model is incomplete or its manifest is unreadable.
    manifest: Manifest | None = None


class Library:
    """Models by name. Many processes may use the library at once."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` None: the user's model folder."""
        self.folder = models_folder() if folder is None else folder
        self.partial = self.folder / ".partial"

    def path(self, name: str) -> Path:
        """Return the path of a model's file, even if no file exists. Raises InvalidRequestError for an invalid name."""
        return self.folder / f"{check_name(name)}.gguf"

    def find(self, name: str) -> Manifest | None:
        """Return the manifest of a complete model, None if the model is missing. Raises InvalidRequestError."""
        return read_kept(self._manifest(name), Manifest) if has_file(self.path(name)) else None

    def entries(self) -> list[LibraryEntry]:
        """Return all models by name, unfinished downloads included. Files without a valid model name are skipped."""
        models = {path.stem: path for path in self._glob(self.folder, "*.gguf")}
        manifests = {path.stem for path in self._glob(self.folder, "*.json")}
        under_way = {path.stem: path for path in self._glob(self.partial, "*.part")}
        entries = [self._entry(name, path) for name, path in models.items()]
        entries += [LibraryEntry(name, "missing", 0, "") for name in manifests - models.keys() - under_way.keys()]
        for name, path in under_way.items():
            record = read_resume_record(self.partial, name)
            entries.append(LibraryEntry(name, "partial", path.stat().st_size, "" if record is None else record.source))
        return sorted(entries, key=lambda entry: (entry.name, entry.state))

    def remove(self, name: str) -> int:
        """Delete a model and its unfinished download; return the bytes that this frees.

        Raises ModelNotFoundError; OverloadedError while another process pulls the model.
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
        """Move a complete download to its final name atomically. Raises OSError."""
        path = self.path(manifest.name)
        part.sync()
        # A model without a manifest counts as damaged and is fetched again, so a crash never leaves a wrong model that
        # looks complete. The old manifest is removed before its model is replaced; the new manifest comes last.
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
        """Flush the folder to disk, so that finished renames reach the disk before later renames."""
        if (folder := open_folder(self.folder)) is not None:
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def lock(self, name: str, waiting: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """Lock a model against changes by other processes."""
        return lock(self.folder, check_name(name), waiting)

    def unknown(self, name: str) -> ModelNotFoundError:
        names = ", ".join(entry.name for entry in self.entries()) or "no model at all"
        return ModelNotFoundError(f"There is no model {name!r} in {self.folder}. The folder holds {names}.")

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
            paths = list(folder.glob(pattern)) if folder.is_dir() else []
        except PermissionError:  # the folder belongs to another user
            return []
        return [path for path in paths if is_name(path.stem) and path.is_file()]


def model_path(name: str) -> Path:
    """Return the file that `name` means to the local engine: a model in the user's library, else a path.

    A missing model is reported on opening. A name that is no path means the library, never the working folder.
    """
    library = Library()
    if is_path(name) and not (is_name(name) and library.find(name)):
        return Path(name).expanduser()
    return library.folder / f"{name.replace('/', '-')}.gguf"
