"""Length-prefixed frames and environment for sandboxed child processes that run untrusted templates and grammars.

A child reads frames from standard input, answers on standard output, and exits at the end of the input, so that no
child outlives the parent. A child imports the parent's modules, but not its environment, which may hold keys.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from typing import IO

from ..protocol.safety.system import disable_core_files, module_path

LENGTH = struct.Struct("!I")
# Environment variables that Python and native modules need; TZ is for templates that print a date.
_ENVIRONMENT = ("DYLD_LIBRARY_PATH", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "SYSTEMROOT", "TZ")


def environment() -> dict[str, str]:
    """Return the child's environment: the necessary variables, and the parent's module path."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return {**kept, **module_path()}


def frame(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def read(stream: IO[bytes]) -> bytes:
    """Read the next frame's message; empty if the stream ends first."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return b""
    (length,) = LENGTH.unpack(header)
    message = stream.read(length)
    return message if len(message) == length else b""


# Functions for the child process.


def prepare() -> None:
    """Set up the child: ignore interrupts, exit quietly if the parent has died, and write no core files."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    disable_core_files()


def receive() -> bytes:
    """Read the next message; empty at the end of the input."""
    return read(sys.stdin.buffer)


def send(message: bytes) -> None:
    sys.stdout.buffer.write(frame(message))
    sys.stdout.buffer.flush()
