"""On a GPU: a block of code in which the host may not wait for the device, but for events."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def nothing_waits() -> Generator[None]:
    """torch raises for whatever would synchronise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
