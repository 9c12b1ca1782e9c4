"""A group of ranks that are threads of one process."""

from __future__ import annotations

import queue
import threading
from typing import Self

import torch
from torch import Tensor
from updraft.cloud_engine.models.sharding import ModelGroup


class ThreadGroup(ModelGroup):
    """A rank of a group whose ranks are threads of this process."""

    def __init__(self, rank: int, barrier: threading.Barrier, sent: list[Tensor | None]) -> None:
        self.rank, self.size = rank, barrier.parties
        self.handed_on = queue.SimpleQueue[Tensor]()
        self.before: ThreadGroup | None = None
        self._barrier, self._sent = barrier, sent
        self.sent_bytes: list[int] = []

    @classmethod
    def of(cls, size: int) -> list[Self]:
        barrier, sent = threading.Barrier(size), list[Tensor | None]([None] * size)
        return [cls(rank, barrier, sent) for rank in range(size)]

    @classmethod
    def in_stages(cls, size: int, num_stages: int) -> list[Self]:
        """All ranks, those of the first stage first."""
        stages = [cls.of(size) for _ in range(num_stages)]
        for number, stage in enumerate(stages):
            for group, before in zip(stage, stages[number - 1], strict=True):
                group.stage, group.num_stages, group.before = number, num_stages, before
        return [group for stage in stages for group in stage]

    def hand_on(self, hidden: Tensor) -> None:
        self.handed_on.put(hidden.clone())

    def take_over(self, into: Tensor) -> Tensor:
        assert self.before is not None
        return into.copy_(self.before.handed_on.get(timeout=60))

    def sum(self, partial: Tensor) -> Tensor:
        return torch.stack(self._exchanged(partial)).sum(0)

    def join(self, part: Tensor) -> Tensor:
        return torch.cat(self._exchanged(part), dim=-1)

    def _exchanged(self, tensor: Tensor) -> list[Tensor]:
        self._sent[self.rank] = tensor
        self.sent_bytes.append(tensor.nbytes)
        self._barrier.wait(60)
        tensors = [each.clone() for each in self._sent if each is not None]
        self._barrier.wait(60)
        return tensors
