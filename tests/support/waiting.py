"""Waiting for what other processes and threads do, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.02)
