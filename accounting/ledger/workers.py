"""Liveness of a ledger's worker processes, by file locks that the kernel releases when a process ends."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator, Iterable
from pathlib import Path

from ...protocol.errors import StorageError
from ...protocol.safety.database import FORKS
from ...protocol.safety.private_files import private_file
from ...protocol.safety.system import try_lock

MAX_WORKERS = 32


class WorkerSlot:
    """One of `most` numbered slots in `folder`. The process holds the slot until `close()` or its own death.

    Raises StorageError if all slots are taken, or the folder cannot be used.
    """

    def __init__(self, folder: Path, most: int = MAX_WORKERS) -> None:
        self.id = secrets.token_hex(8)
        self.folder = folder
        self._most = most
        try:
            self._file, self.number = self._take()
            os.write(self._file, self.id.encode())
        except OSError as error:
            raise StorageError(f"Cannot use {folder} for the locks of the workers: {error}.") from error
        FORKS.add(self)

    def close(self) -> None:
        """Release the slot. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def before_fork(self, _: float, /) -> bool:
        return True

    def after_fork(self, in_child: bool, /) -> None:
        """Release the slot in a forked child, so that the lock ends with the parent."""
        if in_child:
            self.close()

    def living(self, numbers: Iterable[int]) -> set[int]:
        """Return those of `numbers` whose slots are held by live workers."""
        return {number for number in numbers if self._holder(number)}

    def live_ids(self) -> list[str]:
        """Return the ids of all live workers."""
        return [worker for number in range(self._most) if (worker := self._holder(number))]

    @property
    def intents(self) -> Path:
        """Path of the file for this worker's rows."""
        return _intents(self.folder, self.number)

    def _take(self) -> tuple[int, int]:
        for number in range(self._most):
            file = os.open(private_file(_lock(self.folder, number)), os.O_RDWR)
            if try_lock(file):
                return file, number
            os.close(file)
        raise StorageError(f"{self._most} processes already share {self.folder}: use fewer, or another database.")

    def _holder(self, number: int) -> str:
        """Return the id of the slot's holder, or an empty string."""
        if number == self.number:
            return self.id
        try:
            file = os.open(_lock(self.folder, number), os.O_RDWR)
        except FileNotFoundError:
            return ""
        try:
            return "" if try_lock(file) else os.read(file, 16).decode("ascii", "replace")
        finally:
            os.close(file)


def orphaned_intents(folder: Path, most: int, own: int | None) -> Generator[Path]:
    """Yield the row files of dead workers. New workers cannot take a file while it is yielded. Raises OSError."""
    for number in range(most):
        if number == own or not _intents(folder, number).exists():
            continue
        file = os.open(private_file(_lock(folder, number)), os.O_RDWR)
        try:
            if try_lock(file):
                yield _intents(folder, number)
        finally:
            os.close(file)


def _intents(folder: Path, number: int) -> Path:
    return folder / f"intents-{number}"


def _lock(folder: Path, number: int) -> Path:
    return folder / f"worker-{number}"
