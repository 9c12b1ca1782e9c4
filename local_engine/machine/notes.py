"""Findings about this machine or a file, kept in the state folder so that they are made once."""

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
Note = TypeVar("Note", bound=msgspec.Struct)


class Notes:
    """One small JSON file per key, under `state folder/topic/`. Safe with many processes: a note appears whole."""

    def __init__(self, topic: str) -> None:
        self.folder = settings.state_folder() / topic

    def read(self, key: str, kind: type[Note]) -> Note | None:
        """The note; None if there is none or it cannot be understood, which is the same: find out again."""
        return read_kept(self._file(key), kind)

    def write(self, key: str, note: msgspec.Struct) -> None:
        """Keep it. A folder that cannot be written is logged: then it is found out again next time."""
        file = self._file(key)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        try:
            private_file(temporary).write_bytes(msgspec.json.encode(note))
            temporary.replace(file)
        except OSError as error:
            _log.info("The state folder cannot be written, so nothing is remembered: %s", error)

    def _file(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def file_key(path: Path) -> str:
    """Identifies a file and its contents without reading it. Raises ModelLoadError if it is not there."""
    try:
        found = path.stat()
    except OSError as error:
        raise ModelLoadError(f"Cannot open the model file {path}: {error.strerror}. Check the path.") from error
    return repr((str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ctime_ns))
