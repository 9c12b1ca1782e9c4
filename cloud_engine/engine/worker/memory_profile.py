"""Memory of a GPU for the KV cache: the share to use, less weights, the peak of the largest step, and CUDA graphs.

The peak is measured at the first start. Later starts with the same model, limits and versions read the measurement from
a file. Its key has the layout of the weights, not their values, which do not matter for memory.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import torch

from .... import __version__
from ....kernels.attention.block_tables import BlockTables
from ....protocol.decoding import prepare_types
from ....protocol.errors import ConfigurationError
from ....protocol.safety.private_files import write_private
from ....protocol.settings import state_folder
from ...models.causal_model import CausalModel
from ..config import EngineConfig
from .model_runner import Runner, graph_limits
from .warm_up import largest_step

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Memory of a device at one moment, in bytes."""

    total: int
    # Unused by all processes.
    free: int
    # Held by torch.
    reserved: int
    # In use by torch's tensors.
    allocated: int
    # Maximum of `allocated` since the last `DeviceMemory.settle`.
    peak: int

    @property
    def outside(self) -> int:
        """Memory that torch does not hold: kernels, the CUDA context and other processes."""
        return self.total - self.free - self.reserved


class DeviceMemory(Protocol):
    """A device whose memory can be read."""

    @property
    def name(self) -> str: ...

    def settle(self) -> None:
        """Return the memory that torch holds but does not use, and begin a new `MemoryFigures.peak`."""
        ...

    def figures(self) -> MemoryFigures: ...


class CudaMemory:
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self._device)

    def settle(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def figures(self) -> MemoryFigures:
        free, total = torch.cuda.mem_get_info(self._device)
        reserved, allocated = torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device)
        return MemoryFigures(total, free, reserved, allocated, torch.cuda.max_memory_allocated(self._device))


class MemoryProfile(msgspec.Struct, frozen=True):
    """Bytes that a model needs in addition to its weights and KV cache."""

    # Peak of the largest step, and memory outside torch that the first step takes.
    step: Annotated[int, msgspec.Meta(ge=1)]
    # CUDA graphs of all sizes.
    graphs: Annotated[int, msgspec.Meta(ge=0)]


prepare_types(MemoryProfile)


def gpu_cache_bytes(
    models: Sequence[CausalModel], config: EngineConfig, memory: DeviceMemory | None = None
) -> int | None:
    """Return the bytes for the KV cache of `models` on their GPU; None on a CPU and for a configured number of blocks.

    Call this after the weights are loaded, and before any other use of the device. `memory` is the models' device.
    """
    device = models[0].device
    if config.num_gpu_blocks_override is not None or (memory is None and device.type != "cuda"):
        return None
    memory = memory or CudaMemory(device)
    memory.settle()
    loaded = memory.figures()
    path = state_folder() / "memory" / f"{_key(models, config, memory.name)}.json"
    profile = _read(path)
    source = "read from" if profile else "measured; kept in"
    if profile is None:
        profiles = [_measured(model, config, memory) for model in models]
        # Only one model computes at a time, but the graphs of all models remain.
        profile = MemoryProfile(max(each.step for each in profiles), sum(each.graphs for each in profiles))
        _write(path, profile)
        memory.settle()
    available = int(loaded.total * config.gpu_memory_utilization) - (loaded.total - loaded.free)
    available -= profile.step + profile.graphs
    named = {"KV cache": available, "step": profile.step, "CUDA graphs": profile.graphs}
    planned = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in named.items())
    _LOG.info("GPU memory: %s (%s %s)", planned, source, path)
    return max(0, available)


def _measured(model: CausalModel, config: EngineConfig, memory: DeviceMemory) -> MemoryProfile:
    """Measure with a KV cache of one block."""
    tables = BlockTables(config.max_num_seqs, -(-model.config.context_length // config.block_size))
    runner = Runner(model, 1, config.block_size, tables=tables, cache=config.cache)
    limits = graph_limits(config)
    try:
        return measured_profile(
            memory, lambda: largest_step(runner, config), lambda: None if limits is None else runner.capture(limits)
        )
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"The GPU has too little memory for a step of {config.max_num_batched_tokens} tokens: lower "
            "max_num_batched_tokens, or use a smaller model.",
            param="max_num_batched_tokens",
        ) from error


def measured_profile(memory: DeviceMemory, compute: Callable[[], None], capture: Callable[[], None]) -> MemoryProfile:
    """Measure the peak of `compute`, and what `capture` leaves in use."""
    memory.settle()
    before = memory.figures()
    compute()
    computed = memory.figures()
    memory.settle()
    without_graphs = memory.figures()
    capture()
    memory.settle()
    step = computed.peak - before.allocated + max(0, computed.outside - before.outside)
    return MemoryProfile(max(1, step), max(0, without_graphs.free - memory.figures().free))


def _key(models: Sequence[CausalModel], config: EngineConfig, device: str) -> str:
    layouts = [
        (model.config, [(name, tuple(each.shape), each.dtype) for name, each in model.state_dict().items()])
        for model in models
    ]
    limits = (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, config.block_size)
    versions = (__version__, torch.__version__, _triton_version())
    key = (layouts, limits, config.enforce_eager, config.cache, device, versions)
    return hashlib.sha256(repr(key).encode()).hexdigest()[:32]


def _triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> MemoryProfile | None:
    """Return the profile of an earlier start; None without one, and if the file is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=MemoryProfile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        _LOG.warning("%s is ignored, and memory is measured again: %s.", path, error)
        return None


def _write(path: Path, profile: MemoryProfile) -> None:
    try:
        write_private(path, msgspec.json.encode(profile).decode())
    except ConfigurationError as error:
        _LOG.warning("The next start measures memory again: %s", error)
