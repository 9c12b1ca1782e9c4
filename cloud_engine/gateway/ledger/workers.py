"""The worker processes of a gateway that live: each holds a lock that the kernel takes back when the process ends."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from ....protocol.errors import ConfigurationError
from ....protocol.safety.private_files import private_file
from ....protocol.safety.system import try_lock

MAX_WORKERS = 32


class WorkerSlot:
    """One of 32 numbered places in `folder`, held by this object until `close()` or the death of the process.

    Raises ConfigurationError if all are taken, or the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.id = secrets.token_hex(8)
        self._folder = folder
        try:
            self._file, self.number = self._take()
            os.write(self._file, self.id.encode())
        except OSError as error:
            raise ConfigurationError(f"Cannot use {folder} for the locks of the workers: {error}.") from error

    def close(self) -> None:
        os.close(self._file)

    def living(self, numbers: Iterable[int]) -> set[int]:
        """Those of the slots that are held."""
        return {number for number in numbers if self._holder(number)}

    def live_ids(self) -> list[str]:
        """Of all workers that live."""
        return [worker for number in range(MAX_WORKERS) if (worker := self._holder(number))]

    @property
    def intents(self) -> Path:
        """The file for what this worker has begun."""
        return self._intents(self.number)

    def left_behind(self) -> Iterator[Path]:
        """The same of dead workers, whose places nobody takes while the loop is at it."""
        for number in range(MAX_WORKERS):
            if number == self.number or not self._intents(number).exists():
                continue
            file = os.open(private_file(self._path(number)), os.O_RDWR)
            try:
                if try_lock(file):
                    yield self._intents(number)
            finally:
                os.close(file)

    def _take(self) -> tuple[int, int]:
        for number in range(MAX_WORKERS):
            file = os.open(private_file(self._path(number)), os.O_RDWR)
            if try_lock(file):
                return file, number
            os.close(file)
        raise ConfigurationError(f"{MAX_WORKERS} workers share {self._folder} already: use fewer, or another --db.")

    def _holder(self, number: int) -> str:
        """Empty: nobody."""
        if number == self.number:
            return self.id
        try:
            file = os.open(self._path(number), os.O_RDWR)
        except FileNotFoundError:
            return ""
        try:
            return "" if try_lock(file) else os.read(file, 16).decode("ascii", "replace")
        finally:
            os.close(file)

    def _intents(self, number: int) -> Path:
        return self._folder / f"intents-{number}"

    def _path(self, number: int) -> Path:
        return self._folder / f"worker-{number}"
