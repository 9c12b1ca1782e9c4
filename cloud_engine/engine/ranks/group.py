"""The collectives between the ranks, over torch.distributed: NCCL between GPUs, gloo between CPUs."""

# torch leaves its collectives untyped
# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ....protocol.errors import ConfigurationError, EngineError
from ...models.sharding import ModelGroup
from ..config import EngineConfig

COLLECTIVE_S = 60
"""Seconds that a rank waits for the others in a collective; then the group is broken."""

_INTERFACES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


class RankGroup(ModelGroup):
    """The ranks of one model, each in its own process. Rank 0 is in the last stage, because it samples."""

    def __init__(self, rank: int, config: EngineConfig) -> None:
        """`rank`: number of this process among all."""
        self.size, self.num_stages = config.tensor_parallel, config.pipeline_parallel
        self.expert_parallel = config.enable_expert_parallel
        self.rank = rank % self.size
        self.stage = self.num_stages - 1 - rank // self.size
        self._number = rank
        self._device = config.device
        self._stage_group: dist.ProcessGroup | int | None = None  # None: all ranks

    def connect(self, store: dist.Store, interface: str | None) -> None:
        """Connect the ranks over a network interface. Raises RuntimeError if one does not come in time."""
        for name in _INTERFACES:
            if interface is not None:
                os.environ.setdefault(name, interface)
        patience = timedelta(seconds=COLLECTIVE_S)
        dist.init_process_group(
            "gloo" if self._device == "cpu" else "nccl",
            store=store,
            timeout=patience,
            world_size=self.size * self.num_stages,
            rank=self._number,
        )
        for stage in range(self.num_stages if self.num_stages > 1 else 0):  # all ranks take part in making each group
            first = (self.num_stages - 1 - stage) * self.size
            made = dist.new_group(list(range(first, first + self.size)), timeout=patience)  # else torch's 30 min
            if stage == self.stage:
                self._stage_group = made

    def sum(self, partial: Tensor) -> Tensor:
        """Raises EngineError if another rank has ended, or is silent for `COLLECTIVE_S`."""
        with _breaking():
            dist.all_reduce(partial, group=self._stage_group)
        return partial

    def join(self, part: Tensor) -> Tensor:
        """Raises EngineError if another rank has ended, or is silent for `COLLECTIVE_S`."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        with _breaking():
            dist.all_gather(parts, part, group=self._stage_group)
        return torch.cat(parts, dim=-1)

    def hand_on(self, hidden: Tensor) -> None:
        """Raises EngineError if another rank has ended, or is silent for `COLLECTIVE_S`."""
        with _breaking():
            dist.send(hidden, self._number - self.size)

    def take_over(self, into: Tensor) -> Tensor:
        """Raises EngineError if another rank has ended, or is silent for `COLLECTIVE_S`."""
        with _breaking():
            dist.recv(into, self._number + self.size)
        return into


@contextmanager
def _breaking() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:  # of gloo or NCCL
        raise EngineError(f"A rank ended, or did not answer within {COLLECTIVE_S} s.") from error


def of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """Return a rank's configuration: its GPU, or its share of this machine's threads.

    Raises ConfigurationError if the configuration names a single GPU.
    """
    if ":" in config.device:
        fault = f"{config.num_ranks} ranks use as many GPUs: set device to cuda instead of {config.device}."
        raise ConfigurationError(fault, param="device")
    per_machine = config.num_ranks // config.nnodes
    if config.device != "cpu":
        return replace(config, device=f"cuda:{rank % per_machine}")
    at_once = min(config.tensor_parallel, per_machine)  # stages take turns
    return replace(config, threads=config.threads or max(1, torch.get_num_threads() // at_once))
