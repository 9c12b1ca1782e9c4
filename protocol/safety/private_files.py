"""Files that only the user may read: what Updraft keeps can hold keys, and tells who asked what, when and how often."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigurationError
from ..settings import own_folders

_SQLITE_COMPANIONS = ("-wal", "-shm", "-journal")


def is_own(path: Path) -> bool:
    """Whether it lies in one of the folders that are Updraft's alone, or is one."""
    return any(path.absolute().is_relative_to(folder.absolute()) for folder in own_folders())


def private_folder(folder: Path) -> None:
    """The folder, made for the user alone where it is missing. Raises OSError.

    One of Updraft's own that others can enter is closed to them, with those above it that are Updraft's, too.
    """
    path = folder.absolute()
    for each in (*reversed(path.parents), path):
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)
        if is_own(each):
            _close(each, 0o700)


def make_folder(folder: Path) -> None:
    """Make it, for the user alone if it is one of Updraft's own. Raises OSError."""
    if is_own(folder):
        private_folder(folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)


def private_file(path: Path) -> Path:
    """Create the file for the user alone, or take the rights of others away from an existing file. Raises OSError.

    The same holds for the files that SQLite keeps beside a database. An existing file is never opened: closing any
    descriptor of a file drops all POSIX locks of this process on the file, and with them the locks of SQLite.
    """
    create_private(path)
    for each in (path, *(path.with_name(path.name + ending) for ending in _SQLITE_COMPANIONS)):
        _close(each, 0o600)
    return path


def create_private(path: Path) -> None:
    """Create the file for the user alone. An existing file keeps its rights until its content is checked."""
    private_folder(path.parent)
    if not path.exists():
        _create(path.resolve())  # a link may point to a file that is still missing


def prepared(path: Path) -> Path:
    """The file that is to be written next: for the user alone in Updraft's own folders. Raises OSError."""
    return private_file(path) if is_own(path) else path


def has_file(path: Path) -> bool:
    """Whether the file is there, as far as this process can see: a folder that it cannot search has none."""
    try:
        return path.is_file()
    except OSError:  # Python 3.13 and earlier raise it for a folder of another user
        return False


def close_to_others(path: Path) -> None:
    """Close an existing file and its folder to others, as far as they belong to Updraft and may be changed."""
    for each, mode in ((path.parent, 0o700), (path, 0o600)):
        if is_own(each):
            _close(each, mode)


def write_private(path: Path, text: str) -> None:
    """Write a file that only the user can read, all at once. Raises ConfigurationError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        private_folder(path.parent)
        temporary.unlink(missing_ok=True)  # and never through a link that somebody put there
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}.") from error


def _create(path: Path) -> None:
    """Create an empty file without a descriptor where the system can: another thread may open the file at once."""
    with suppress(FileExistsError):
        try:
            os.mknod(path, stat.S_IFREG | 0o600)
        except (AttributeError, PermissionError):  # Windows has no mknod, macOS reserves it for root
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def _close(path: Path, mode: int) -> None:
    """Take the rights of others away from a file or folder of this user.

    Devices such as /dev/null keep their rights, and so do folders for all like /tmp. Root changes files of other users
    in Updraft's own folders only.
    """
    with suppress(OSError):  # a path of another user, a read-only mount
        status, user = path.stat(), getattr(os, "geteuid", lambda: 0)()
        found = status.st_mode
        is_ours = (stat.S_ISREG(found) or stat.S_ISDIR(found)) and (status.st_uid == user or is_own(path))
        if is_ours and found & 0o077 and not found & stat.S_ISVTX:
            path.chmod(stat.S_IMODE(found) & mode)
