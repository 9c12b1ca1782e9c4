"""Ports for servers that restart at the same address, and for addresses at which no server listens."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_BELOW_EPHEMERAL = range(15_000, 32_000)  # below the range from which the system picks ports for other sockets


def free_port() -> int:
    """Return a free loopback port, which connections and servers of other tests do not take by accident."""
    for port in random.SystemRandom().sample(_BELOW_EPHEMERAL, 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("there is no free port")
