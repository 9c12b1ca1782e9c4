"""Checks and selects the compute device. Triton launches on the thread's current CUDA device."""

from __future__ import annotations

import re

import torch

from ....protocol.errors import ConfigurationError


def use_device(name: str) -> None:
    """Check a device name such as `cpu`, `cuda` or `cuda:1`; make `cuda:N` the current device of this thread.

    Raises ConfigurationError if the name is invalid or the device is not available.
    """
    if name == "cpu":
        return
    numbered = re.fullmatch(r"cuda(?::(\d+))?", name)
    if numbered is None:
        raise ConfigurationError(f"device must be cpu, cuda or cuda:NUMBER, got {name!r}.", param="device")
    if not torch.cuda.is_available():
        raise ConfigurationError("device: torch finds no CUDA device here. Use --device cpu.", param="device")
    index = numbered.group(1)
    if index is None:
        return
    if int(index) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigurationError(f"device: {name} not found; torch sees {count} devices, from 0.", param="device")
    torch.cuda.set_device(int(index))
