"""Platform-dependent features: file locks, process limits, signals, file owners, Unix sockets, Python processes.

Other modules use these features only through this module. A platform without a feature lacks only the protection by
that feature.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import ipaddress
import os
import re
import shutil
import signal
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, DiskSpaceError

#: Error numbers of writes to a full disk.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: Signal that ends a process at once.
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
#: Signals that request an orderly shutdown.
END_SIGNALS: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)

_SHORT_FOLDER = "/tmp"
_LOCKED_BYTE = 2**30  # byte to lock on Windows; beyond all files, because a locked byte cannot be read
_LOCK_PAUSE_S = 0.01
_BOOT_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", None)
_MAX_SOCKET_PATH = 103  # maximum bytes; macOS has the lowest limit of all systems
_GET_ADDRESS = 0x8915  # Linux's SIOCGIFADDR; the address begins at byte 20 of the answer
_LISTENS = "0A"  # state of a listening socket in /proc/net/tcp
_READS = 3  # maximum reads of a /proc/net table, which may change during a read and miss a line
_MAPPED = bytes(10) + b"\xff\xff"  # prefix of IPv4 addresses mapped to IPv6
#: Result of `connection_user` if the client has already closed the connection.
NO_USER = -1
# Folder that contains this package. Even as working folder it is trusted, as its owner can change the package anyway.
_HOME = os.path.abspath(Path(__file__).parents[3])  # noqa: PTH100 - keep links: the package may be a link


@contextmanager
def on_hangup(act: Callable[[], None]) -> Generator[None]:
    """Run `act` in the event loop at every SIGHUP. Does nothing without SIGHUP or outside the main thread."""
    number = getattr(signal, "SIGHUP", None)
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)


def ignore_hangup() -> None:
    """Ignore SIGHUP unless the process has a terminal, so that a reload signal does not end a server."""
    number = getattr(signal, "SIGHUP", None)
    if number is not None and not (sys.stdin and sys.stdin.isatty()):
        signal.signal(number, signal.SIG_IGN)


@cache
def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@contextmanager
def locked(handle: int, waiting: Callable[[], None] = lambda: None) -> Generator[None]:
    """Take an exclusive lock on an open file or folder, waiting for other processes; closing the handle releases it.
    `waiting` is called before the wait; an exception that it raises prevents the wait."""
    if not try_lock(handle):
        waiting()
        if (fcntl := _module("fcntl")) is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        while fcntl is None and not try_lock(handle):
            time.sleep(_LOCK_PAUSE_S)
    yield


def try_lock(handle: int) -> bool:
    """Take the lock of `locked` if it is free, until `unlock` or the end of the process. Returns whether it was free.
    Always succeeds on a system without file locks."""
    if (fcntl := _module("fcntl")) is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    elif (msvcrt := _module("msvcrt")) is not None:
        unlock(handle)  # Windows refuses to lock a byte twice through one handle
        return _lock_byte(handle, msvcrt.LK_NBLCK)
    return True


def unlock(handle: int) -> None:
    if (fcntl := _module("fcntl")) is not None:
        fcntl.flock(handle, fcntl.LOCK_UN)
    elif (msvcrt := _module("msvcrt")) is not None:
        _lock_byte(handle, msvcrt.LK_UNLCK)


def _lock_byte(handle: int, mode: int) -> bool:
    """Lock or unlock the byte that represents the whole file on Windows. Returns False if the lock is taken."""
    position = os.lseek(handle, 0, os.SEEK_CUR)
    os.lseek(handle, _LOCKED_BYTE, os.SEEK_SET)
    try:
        _module("msvcrt").locking(handle, mode, 1)
    except OSError:
        return False
    finally:
        os.lseek(handle, position, os.SEEK_SET)
    return True


def reserve_blocks(handle: int, path: Path, size: int) -> None:
    """Allocate `size` bytes on disk for an open file before mapping it. Writing to a mapped page without a disk block
    would kill the process by SIGBUS. Raises DiskSpaceError, OSError."""
    missing = size - os.fstat(handle).st_size
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        elif missing > 0:
            os.lseek(handle, 0, os.SEEK_END)
            os.write(handle, bytes(missing))
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        free = shutil.disk_usage(path.parent).free
        why = f"but its disk has only {free:,} free: free space or choose another folder"
        if error.errno == errno.EFBIG:
            why = "more than this process may write to a file: raise the limit (ulimit -f)"
        raise DiskSpaceError(f"{path} needs {size:,} bytes, {why}.", needed=size, free=free) from error


def boot_time() -> float:
    """Return seconds since boot, including suspends. All processes see the same value, whatever the wall clock says."""
    return time.monotonic() if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK)


@cache
def boot_id() -> str:
    """Return the id of this boot, to tell whether a stored `boot_time` is still valid; empty if not available."""
    return "".join(_lines(Path("/proc/sys/kernel/random/boot_id")))


def fork() -> int:
    """Call `os.fork`. Raises ConfigurationError on systems without fork."""
    if not hasattr(os, "fork"):
        raise ConfigurationError("Several workers need Linux or macOS: use --workers 1 here.", param="workers")
    return os.fork()


def raise_descriptor_limit(wanted: int) -> int:
    """Raise the limit of open files towards `wanted`, as far as allowed, and return the limit."""
    resource = _module("resource")
    if resource is None:  # Windows, where sockets are not descriptors
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else soft


def open_folder(folder: Path) -> int | None:
    """Open a folder for `locked` and `fsync`; None on Windows, where folders cannot be opened."""
    return None if sys.platform == "win32" else os.open(folder, os.O_RDONLY)


def is_owned_by_user(path: Path) -> bool:
    owner = getattr(os, "getuid", None)
    return owner is None or path.stat().st_uid == owner()


def is_changeable_by_others(path: Path) -> bool:
    """Return whether a file is world-writable, belongs to another user, and is not on a read-only mount."""
    open_to_all = bool(path.stat().st_mode & stat.S_IWOTH) and not is_owned_by_user(path)
    look = getattr(os, "statvfs", None)
    return open_to_all and not (look is not None and bool(look(path).f_flag & os.ST_RDONLY))


def forbids_execution(folder: Path) -> bool:
    """Return whether the folder is on a noexec mount; always False outside Linux."""
    look = getattr(os, "statvfs", None)
    return sys.platform == "linux" and look is not None and bool(look(folder).f_flag & os.ST_NOEXEC)


def disable_core_files() -> None:
    if (resource := _module("resource")) is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def limit_memory(extra_bytes: int) -> None:
    """Limit this process's address space to the current size plus `extra_bytes`. Effective only on Linux."""
    resource = _module("resource")
    if sys.platform == "linux" and resource is not None:
        mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + extra_bytes, hard))


def limit_time(cpu_seconds: float, wall_seconds: float = 0.0) -> None:
    """End this process after seconds of CPU time or wall time; 0 means no limit. Windows limits only the wall time."""
    timer = getattr(signal, "setitimer", None)
    if timer is not None:
        timer(signal.ITIMER_PROF, cpu_seconds)
        timer(signal.ITIMER_REAL, wall_seconds)
        return
    import faulthandler

    if wall_seconds:
        faulthandler.dump_traceback_later(wall_seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def socket_folder(prefix: str, name: str) -> Path:
    """Create a private temporary folder whose path is short enough for a Unix socket called `name`. The folder is in
    the default temporary folder, or else in /tmp. Raises ConfigurationError if neither path is short."""
    for parent in (tempfile.gettempdir(), _SHORT_FOLDER):
        with suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            if len(os.fsencode(folder / name)) <= _MAX_SOCKET_PATH:
                return folder
            folder.rmdir()
    raise ConfigurationError(
        f"The path {tempfile.gettempdir()} is too long for a Unix socket: set TMPDIR to a folder with a shorter path."
    )


def socket_address(path: Path) -> str:
    """Return the ZeroMQ address of a Unix socket. Raises ConfigurationError on systems without Unix sockets."""
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigurationError("A node needs Unix sockets, which this system lacks: run it on Linux, macOS or WSL.")
    return f"ipc://{path}"


def interface_of(address: str) -> str | None:
    """Return the network interface with an IPv4 address of this machine. None: unknown."""
    if (fcntl := _module("fcntl")) is None or not sys.platform.startswith("linux"):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def listener_on(port: int) -> str | None:
    """Return name and id of the process listening on a TCP port; None if unknown or not visible to this user."""
    inodes = {
        fields[9]
        for table in ("tcp", "tcp6")
        for line in _lines(Path("/proc/net") / table)[1:]
        if (fields := line.split())[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port
    }
    for link in Path("/proc").glob("[0-9]*/fd/*") if inodes else ():
        with suppress(OSError):  # the process has ended, or belongs to another user
            kind, _, inode = str(link.readlink()).partition(":[")
            if kind == "socket" and inode.rstrip("]") in inodes:
                process = link.parents[1]
                return f"{_lines(process / 'comm')[0]} (process {process.name})"
    return None


def own_user() -> int | None:
    """Return the effective uid of this process; None on systems without uids."""
    user = getattr(os, "geteuid", None)
    return None if user is None else user()


def connection_user(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the uid of the client of a local TCP connection. `server` is this process's end of the connection. Returns
    NO_USER if the client has closed its socket, since Linux then drops the owner; None if not available."""
    client_forms, server_forms = _listed(*client), _listed(*server)
    read = ""
    for name in list(client_forms) * _READS:
        read += (table := "\n".join(_lines(Path("/proc/net") / name)))
        if (at := table.find(f" {client_forms[name]} {server_forms[name]} ")) >= 0:
            _, _, _, _, _, _, uid, _, inode, *_ = table[at:].partition("\n")[0].split()
            return int(uid) if int(inode) else NO_USER
    # The tables are readable and complete if they list the socket of this process.
    is_complete = re.search(rf"^ *\d+: [0-9A-F]+:{server[1]:04X} ", read, re.MULTILINE)
    return NO_USER if is_complete else None


def _listed(host: str, port: int) -> dict[str, str]:
    """Return a socket's address in the notation of each /proc/net table: hexadecimal words in native byte order."""
    address = ipaddress.ip_address(host.partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    forms = {"tcp6": address.packed}
    if address.version == 4:
        forms = {"tcp": address.packed, "tcp6": _MAPPED + address.packed}
    return {
        name: "".join(f"{word:08X}" for (word,) in struct.iter_unpack("=I", packed)) + f":{port:04X}"
        for name, packed in forms.items()
    }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def python_command(*arguments: str) -> list[str]:
    """Return a command that runs this interpreter without the working folder on the module path, where a `json.py` in a
    downloaded model's folder would run."""
    return [sys.executable, "-P", *arguments]


def module_path() -> dict[str, str]:
    """Return variables that give child processes this process's module path, without the working folder."""
    return {"PYTHONPATH": os.pathsep.join(_safe(sys.path)), "PYTHONSAFEPATH": "1"}


def child_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with `module_path` and `variables` added."""
    return {**os.environ, **module_path(), **variables}


def _safe(path: Sequence[str]) -> list[str]:
    """Return `path` without the working folder, unless that folder contains the package."""
    try:
        entries = [os.path.abspath(entry) for entry in path]  # noqa: PTH100 - as above
    except FileNotFoundError:  # the working folder was deleted, so nothing can be imported relative to it
        entries = list(filter(os.path.isabs, path))
    return [entry for entry in entries if entry == _HOME or not _is_working_folder(entry)]


def _is_working_folder(folder: str) -> bool:
    try:
        return Path(folder).samefile(Path.cwd())
    except OSError:  # a folder is missing, so nothing can be imported from it
        return False
