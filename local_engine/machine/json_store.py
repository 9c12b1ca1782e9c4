"""Results of checks and measurements, saved in the state folder so that each is computed only once."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from ...protocol import settings
from ...protocol.decoding import read_kept
from ...protocol.errors import ModelLoadError
from ...protocol.safety.private_files import private_file

_log = logging.getLogger("updraft.local")
Stored = TypeVar("Stored", bound=msgspec.Struct)


class JsonStore:
    """One small JSON file per key, under `state folder/topic/`. Processes can share it, because writes are atomic."""

    def __init__(self, topic: str) -> None:
        self.folder = settings.state_folder() / topic

    def read(self, key: str, kind: type[Stored]) -> Stored | None:
        """Return the saved value of a key; None if the file is missing or unreadable."""
        return read_kept(self._file(key), kind)

    def write(self, key: str, note: msgspec.Struct) -> None:
        """Save `note` as the value of `key` atomically. If the folder is not writable, log the error and continue."""
        file = self._file(key)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        try:
            private_file(temporary).write_bytes(msgspec.json.encode(note))
            temporary.replace(file)
        except OSError as error:
            _log.info("Could not write to the state folder, so a measured result is not saved: %s", error)

    def _file(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def file_key(path: Path) -> str:
    """Return a key that changes with the file's path, size or times. Raises ModelLoadError if the file is missing."""
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelLoadError(f"Cannot open the model file {path}: {error.strerror}. Check the path.") from error
    return repr((str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
