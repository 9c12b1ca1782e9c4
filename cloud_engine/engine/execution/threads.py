"""Torch threads per step on a CPU: fewer while other processes need the cores."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....kernels.runtime.contention import ThreadGovernor
from ..config import EngineConfig


def yields_to_neighbours(config: EngineConfig) -> Callable[[], None]:
    """Return a function to call before each step that lowers torch's thread count while the machine is busy.

    It does nothing on GPUs or in batch-invariant mode, where the thread count must not change the order of sums.
    """
    if config.device != "cpu" or config.batch_invariant:
        return lambda: None
    governor = ThreadGovernor(torch.get_num_threads())

    def yield_to_neighbours() -> None:
        threads = governor.threads()
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    return yield_to_neighbours
