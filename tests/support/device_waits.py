"""Checks that the host does not wait for the GPU in a block of code, except for events."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def forbid_device_waits() -> Generator[None]:
    """Make torch raise an error if the block synchronises with the GPU.

    Torch's warning that this mode is experimental is ignored.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
