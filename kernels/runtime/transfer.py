"""Copies of tensors between host and device that do not wait for the device."""

# torch leaves `tolist` untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(staged: Tensor, device: torch.device) -> Tensor:
    """Copy `staged` from the host to `device` without waiting; return it unchanged if no copy is needed."""
    return staged if staged.is_cuda or device.type == "cpu" else staged.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A host copy of `values`, taken after all work launched so far. Reading it does not wait for later work."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._done = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def tolist(self) -> list[Any]:
        """Return the values as nested lists. Waits for the copy."""
        if self._done is not None:
            self._done.synchronize()
        return self._values.tolist()
