"""The threads of a step on a CPU: fewer while other processes need the processors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....kernels.runtime.contention import ThreadGovernor
from ..config import EngineConfig


def yields_to_neighbours(config: EngineConfig) -> Callable[[], None]:
    """To be called before each step: sets torch's threads, at most as many as there are now.

    Does nothing on other devices, and in batch-invariant mode, in which nothing may change how sums are cut.
    """
    if config.device != "cpu" or config.batch_invariant:
        return lambda: None
    governor = ThreadGovernor(torch.get_num_threads())

    def yield_to_neighbours() -> None:
        threads = governor.threads()
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    return yield_to_neighbours
