"""The device that computes: it has to be there, and Triton launches on the current one."""

from __future__ import annotations

import re

import torch

from ....protocol.errors import ConfigurationError


def use_device(name: str) -> None:
    """Check `cpu`, `cuda` or `cuda:1`, and make a CUDA device that has a number the current one of this thread.

    Raises ConfigurationError for anything else, and for a device that is not there.
    """
    if name == "cpu":
        return
    numbered = re.fullmatch(r"cuda(?::(\d+))?", name)
    if numbered is None:
        raise ConfigurationError(f"device must be cpu, cuda or cuda:NUMBER, got {name!r}.", param="device")
    if not torch.cuda.is_available():
        raise ConfigurationError("device: torch sees no CUDA device here. Use --device cpu.", param="device")
    index = numbered.group(1)
    if index is None:
        return
    if int(index) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigurationError(f"device: there is no {name}, torch sees {count}, counted from 0.", param="device")
    torch.cuda.set_device(int(index))
