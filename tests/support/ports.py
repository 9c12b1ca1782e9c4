"""Ports for servers that come back at their address, and for addresses at which nobody listens."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_BELOW_EPHEMERAL = range(15_000, 32_000)  # the system gives these to nobody who asks for any port


def free_port() -> int:
    """A port of loopback that is free, and stays so while other tests open connections and servers."""
    for port in random.SystemRandom().sample(_BELOW_EPHEMERAL, 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("there is no free port")
