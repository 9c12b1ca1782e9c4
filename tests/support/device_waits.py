"""On a GPU: a block of code in which the host may not wait for the device, but for events."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def forbid_device_waits() -> Generator[None]:
    """torch raises for whatever would synchronise. That this may change it says once, as a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
