"""Checks and selects the compute device, and leaves CPU threads to other processes."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from ....kernels.runtime.contention import ThreadGovernor
from ....protocol.errors import ConfigurationError
from ..config import EngineConfig


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


def allow_tf32(name: str) -> None:
    """Let a GPU multiply float32 matrices in TF32, several times as fast. Does nothing for `cpu`."""
    if name != "cpu":
        torch.backends.cuda.matmul.allow_tf32 = True


def yields_to_other_processes(config: EngineConfig) -> Callable[[], None]:
    """Return a function to call before each step, which lowers torch's threads while other processes keep CPUs busy.

    The function does nothing on GPUs, among several ranks, which keep each other's CPUs busy, and in batch-invariant
    mode, where the thread count would affect results."""
    if config.device != "cpu" or config.batch_invariant or config.num_ranks > 1:
        return lambda: None
    governor = ThreadGovernor(torch.get_num_threads())

    def yield_to_other_processes() -> None:
        threads = governor.threads()
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    return yield_to_other_processes
