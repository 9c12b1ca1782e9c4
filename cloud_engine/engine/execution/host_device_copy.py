"""Between host and device, with neither waiting for the other: copies from and to pinned memory."""

# torch leaves `tolist` untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(staged: Tensor, device: torch.device) -> Tensor:
    """`staged`, made on the host for this, on `device`; or what it is, if it is there already."""
    return staged if staged.is_cuda or device.type == "cpu" else staged.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Of `values` as they are once everything that was launched before is done; nothing behind that is waited for."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._done = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def tolist(self) -> list[Any]:
        """Numbers, nested as the tensor's dimensions are. Waits for the copy."""
        if self._done is not None:
            self._done.synchronize()
        return self._values.tolist()
