"""The protocol of a parent and a child process that does the work of strangers: start, frames, limits.

The child reads frames from its standard input and answers on its standard output. The end of its input is its own end,
so it never outlives its parent. It sees the parent's modules, but not its environment, which may hold keys.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from typing import IO

from ..protocol.safety.python_process import module_path
from ..protocol.safety.system import no_core_files

LENGTH = struct.Struct("!I")
# The variables that Python and its native modules need; the time zone is for templates that write a date.
_ENVIRONMENT = ("DYLD_LIBRARY_PATH", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "SYSTEMROOT", "TZ")


def environment() -> dict[str, str]:
    """The variables of a child: those it needs, and where the parent finds its modules."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return {**kept, **module_path()}


def frame(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def read(stream: IO[bytes]) -> bytes:
    """The next frame's message; empty if the stream ends before its end."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return b""
    (length,) = LENGTH.unpack(header)
    message = stream.read(length)
    return message if len(message) == length else b""


# For the child alone.


def prepare() -> None:
    """Interrupts are the parent's to handle, who writes to a dead parent just ends, and a crash leaves no core file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    no_core_files()


def receive() -> bytes:
    """The next message; empty at the end of the input."""
    return read(sys.stdin.buffer)


def send(message: bytes) -> None:
    sys.stdout.buffer.write(frame(message))
    sys.stdout.buffer.flush()
