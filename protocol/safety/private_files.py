"""Files and folders accessible to the user only, because Updraft's state may hold keys and records of requests."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigurationError
from ..settings import own_folders

_SQLITE_COMPANIONS = ("-wal", "-shm", "-journal")


def is_own(path: Path) -> bool:
    """Return whether the path is one of Updraft's own folders or lies inside one."""
    return any(path.absolute().is_relative_to(folder.absolute()) for folder in own_folders())


def private_folder(folder: Path) -> None:
    """Create a missing folder, and its missing parents, for the user only. Raises OSError. Existing folders on the path
    that are Updraft's own are closed to other users."""
    path = folder.absolute()
    for each in (*reversed(path.parents), path):
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)
        if is_own(each):
            _close(each, 0o700)


def file_version(path: Path) -> tuple[int, int, int] | None:
    """Return the file's inode, size and modification time, one of which changes with every rewrite; None if missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def make_folder(folder: Path) -> None:
    """Create a folder. If it is one of Updraft's own, only the user can access it. Raises OSError."""
    if is_own(folder):
        private_folder(folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)


def private_file(path: Path) -> Path:
    """Create a file for the user only, or remove other users' permissions from an existing file. Raises OSError.

    SQLite's companion files are closed to others as well. An existing file is never opened: closing any descriptor of
    a file would release all POSIX locks of this process on it, including SQLite's locks.
    """
    create_private(path)
    for each in (path, *(path.with_name(path.name + ending) for ending in _SQLITE_COMPANIONS)):
        _close(each, 0o600)
    return path


def create_private(path: Path) -> None:
    """Create a missing file for the user only. The permissions of an existing file stay unchanged."""
    private_folder(path.parent)
    if not path.exists():
        _create(Path(os.path.realpath(path)))  # the path may be a link to a missing file


def prepared(path: Path) -> Path:
    """Prepare a file for writing. In Updraft's own folders, make the file private. Raises OSError."""
    return private_file(path) if is_own(path) else path


def has_file(path: Path) -> bool:
    """Return whether the file exists; False if its folder is not accessible."""
    try:
        return path.is_file()
    except OSError:  # raised by Python 3.13 and earlier for a folder of another user
        return False


def restrict_to_owner(path: Path) -> None:
    """Close an existing file and its folder to other users, if they are Updraft's own and can be changed."""
    for each, mode in ((path.parent, 0o700), (path, 0o600)):
        if is_own(each):
            _close(each, mode)


def write_private(path: Path, text: str) -> None:
    """Atomically write a file that only the user can read. Raises ConfigurationError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        private_folder(path.parent)
        temporary.unlink(missing_ok=True)  # another user may have planted a link of this name
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}.") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # left by a failure, such as a full disk


def _create(path: Path) -> None:
    """Create an empty file, if possible without opening it, because closing it could release another thread's locks."""
    with suppress(FileExistsError):
        try:
            os.mknod(path, stat.S_IFREG | 0o600)
        except (AttributeError, PermissionError):  # Windows has no mknod, macOS reserves it for root
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def _close(path: Path, mode: int) -> None:
    """Remove other users' permissions from a file or folder of this user.

    Devices (/dev/null) and shared folders (/tmp) stay unchanged. Root changes others' files only in Updraft's folders.
    """
    with suppress(OSError):  # path of another user, or read-only mount
        status, user = path.stat(), getattr(os, "geteuid", lambda: 0)()
        bits = status.st_mode
        is_own_file = (stat.S_ISREG(bits) or stat.S_ISDIR(bits)) and (status.st_uid == user or is_own(path))
        if is_own_file and bits & 0o077 and not bits & stat.S_ISVTX:
            path.chmod(stat.S_IMODE(bits) & mode)
