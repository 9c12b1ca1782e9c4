"""The collectives between the ranks, over torch.distributed: NCCL between GPUs, gloo between CPUs."""

# torch leaves its collectives untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ....protocol.errors import EngineError
from ...models.sharding import ModelGroup
from ..config import EngineConfig

COLLECTIVE_S = 60
"""Seconds that a rank waits for the others in a collective; then the group is broken."""

_RENDEZVOUS = "rendezvous"


class RankGroup(ModelGroup):
    """The ranks of one model, each in its own process. Rank 0 is in the last stage, because it samples."""

    def __init__(self, rank: int, config: EngineConfig) -> None:
        """`rank`: number of this process among all."""
        self.size, self.num_stages = config.tensor_parallel, config.pipeline_parallel
        self.rank = rank % self.size
        self.stage = self.num_stages - 1 - rank // self.size
        self._number = rank
        self._stage_group: dist.ProcessGroup | int | None = None

    def connect(self, folder: Path, device: str) -> None:
        """Connect the ranks, which meet in a private folder. Raises RuntimeError if one does not come in time."""
        dist.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            init_method=f"file://{folder / _RENDEZVOUS}",
            timeout=timedelta(seconds=COLLECTIVE_S),
            world_size=self.size * self.num_stages,
            rank=self._number,
        )
        for stage in range(self.num_stages):  # all ranks take part in making each group
            first = (self.num_stages - 1 - stage) * self.size
            made = dist.new_group(list(range(first, first + self.size)))
            if stage == self.stage:
                self._stage_group = made
        dist.barrier()  # until all ranks are connected, they need the folder

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


def loopback() -> dict[str, str]:
    """Return environment variables that keep gloo's connections on the loopback interface."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}
