"""Partial files of downloads, with a record that identifies the content, and a lock per model."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import msgspec

from ...protocol.decoding import prepare_types, read_kept
from ...protocol.errors import ConfigurationError, DiskSpaceError, OverloadedError
from ...protocol.safety.private_files import make_folder, prepared
from ...protocol.safety.system import DISK_FULL, locked

#: Bytes of disk space to leave free, because a full disk affects other programs.
SPARE = 64 * 1024 * 1024
_BLOCK = 1024 * 1024
_OTHER_FOLDER = "UPDRAFT_MODELS, or HF_HOME for a node"
_DISK_CHECK_BYTES = 4 * _BLOCK


class ResumeRecord(msgspec.Struct, frozen=True):
    """Record of the content that a partial file is a part of. A partial file with another record is discarded.

    `identity` is `DownloadSpec.identity`.
    """

    identity: str | None
    source: str
    size: int | None


prepare_types(ResumeRecord)


class PartialFile:
    """Open partial file with a running SHA-256. `append` writes without a buffer."""

    def __init__(self, folder: Path, name: str, record: ResumeRecord) -> None:
        """Resume the partial file in `folder` if its record matches, else start a new file. Raises OSError."""
        self.path, self._record = folder / f"{name}.part", record
        self._record_path = resume_record_path(folder, name)
        continued = record.identity is not None and read_resume_record(folder, name) == record
        # Unbuffered, because on a full disk closing would try again to write the buffer, and fail again.
        mode = "r+b" if continued and self.path.exists() else "w+b"
        self._file = prepared(self.path).open(mode, buffering=0)
        self._hash = hashlib.sha256()
        self.size = self._checked_size = 0
        try:
            prepared(self._record_path).write_bytes(msgspec.json.encode(record))
            while block := self._file.read(_BLOCK):
                self._hash.update(block)
                self.size += len(block)
            if record.size is not None and self.size > record.size:
                self.restart()
        except BaseException:
            self._file.close()
            raise

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def append(self, data: bytes) -> None:
        """Write data. Raises DiskSpaceError if the disk is almost full, keeping the bytes if resume is possible."""
        if self.size >= self._checked_size + _DISK_CHECK_BYTES:  # check repeatedly: other programs write too
            self._checked_size = self.size
            if shutil.disk_usage(self.path.parent).free < SPARE:
                raise self._disk_full()
        view = memoryview(data)
        while view:
            try:
                count = self._file.write(view) or 0
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                raise self._disk_full() from error
            self._hash.update(view[:count])
            self.size += count
            view = view[count:]

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._hash = hashlib.sha256()
        self.size = self._checked_size = 0

    def sync(self) -> None:
        """Flush the file to disk, so that after the rename a crash cannot leave a file with missing content."""
        os.fsync(self._file.fileno())

    def discard(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)
        self._record_path.unlink(missing_ok=True)

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and not self.size:
            self.discard()  # nothing to resume
        self._file.close()

    def _disk_full(self) -> DiskSpaceError:
        needed = None if self._record.size is None else self._record.size - self.size
        wanted = "" if needed is None else f", {needed:,} bytes of the download are missing"
        there, advice = f"{self.size:,} bytes are kept", "pull again to resume, or discard them with `updraft rm`"
        if self._record.identity is None:
            self.restart()
            there, advice = "the partial download was deleted", "pull again, from the beginning"
        free = shutil.disk_usage(self.path.parent).free
        return DiskSpaceError(
            f"The disk of {self.path.parent} is full: {there}{wanted}; {free:,} bytes are free, and {SPARE:,} are kept "
            f"in reserve. Free space and {advice}.",
            needed=needed,
            free=free,
        )


def resume_record_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def read_resume_record(folder: Path, name: str) -> ResumeRecord | None:
    """Read the record about a partial file; None if missing or unreadable."""
    return read_kept(resume_record_path(folder, name), ResumeRecord)


def check_disk_space(folder: Path, name: str, needed: int) -> int:
    """Return the free bytes of the folder's disk. Raises DiskSpaceError if fewer than `needed` plus SPARE."""
    free = shutil.disk_usage(next(place for place in (folder, *folder.parents) if os.access(place, os.F_OK))).free
    if needed and needed + SPARE > free:
        raise DiskSpaceError(
            f"{name} needs {needed:,} more bytes (and {SPARE:,} to spare), but the disk of {folder} has {free:,} free. "
            f"Free space, or set a folder on another disk: {_OTHER_FOLDER}.",
            needed=needed,
            free=free,
        )
    return free


@contextmanager
def lock(folder: Path, name: str, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the exclusive lock on a model in the folder, across processes; the system releases it if a process dies.

    If another process holds the lock, calls `waiting` and waits, or raises OverloadedError if `waiting` is None.
    Raises ConfigurationError if the folder is not writable.
    """

    def refuse() -> None:
        raise OverloadedError(f"{name} is being pulled by another process.", code="model_busy")

    file = _lock_file(folder, name)
    try:
        with locked(file, waiting or refuse):
            yield
    finally:
        os.close(file)


def _lock_file(folder: Path, name: str) -> int:
    try:
        for needed in (folder / ".partial", folder / ".locks"):
            make_folder(needed)
        # Never delete lock files. Otherwise two processes could lock different files of the same name.
        path = folder / ".locks" / f"{name}.lock"
        return os.open(prepared(path), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigurationError(
            f"Models cannot be stored in {folder}: {error.strerror}. Set another folder: {_OTHER_FOLDER}."
        ) from error
