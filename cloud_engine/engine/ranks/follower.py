"""Main module of the ranks after rank 0: `python -m ...follower PLACE RANK MODEL` computes a part of each step."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import zmq

from ....kernels.attention.block_tables import BlockTables
from ....kernels.runtime.host_memory import keep_freed_memory
from ....protocol.errors import ConfigurationError
from ....protocol.telemetry.logs import log_to_stderr
from ...models.causal_model import CausalModel
from ..config import EngineConfig
from ..rank_messages import (
    Capture,
    ComputeZeros,
    Join,
    LaunchStep,
    Message,
    NewRunner,
    ReadStep,
    Refusal,
    Release,
    Restore,
    SampleStep,
    decode,
)
from ..step import StepPlan
from ..worker.cuda_graphs import GraphLimits
from ..worker.devices import allow_tf32, use_device
from ..worker.model_runner import Runner
from ..worker.served_model import load_weights
from ..worker.slots import RowsOf, Slots, SlotState
from ..worker.worker import Worker
from .group import RankGroup, of_rank
from .meeting import Meeting, fingerprint
from .store import RankStore, begin_beats


class Follower:
    """A rank's part of the model, with its worker. `follow` does what a message of rank 0 says."""

    def __init__(self, model: CausalModel, config: EngineConfig) -> None:
        self._model = model
        self._config = config
        self._worker: Worker | None = None
        self._plans: deque[StepPlan] = deque()

    def follow(self, message: Message) -> None:
        match message:
            case LaunchStep(plan):
                self._plans.append(plan)
                self.worker.launch(plan, _no_masks)
            case SampleStep(sampling):
                self.worker.sample(sampling)
            case ReadStep(tokens):
                self.worker.read(self._plans.popleft(), tokens)
            case ComputeZeros(rows, num_logits):
                self.worker.runner.compute_zeros(rows, num_logits)
            case Capture(sequences, draft_rows):
                self.worker.runner.capture(GraphLimits(sequences, draft_rows))
            case NewRunner(num_blocks, num_slots, blocks_per_slot, cache):
                self._worker = None  # free its KV cache first
                size, tables = self._config.block_size, BlockTables(num_slots, blocks_per_slot)
                runner = Runner(self._model, num_blocks, size, tables=tables, cache=cache)
                self._worker = Worker(runner, _propose_nothing, partial(Slots, tables, size), self._model.group)
            case Release():
                self.worker.runner.release()
                self.worker.reset()
            case Restore():
                self.worker.runner.restore()
            case Join() | Refusal():
                raise TypeError("A rank joins a group once.")

    @property
    def worker(self) -> Worker:
        assert self._worker is not None, "NewRunner is sent first"
        return self._worker


def main(meeting: Meeting, rank: int, model: Path) -> None:
    """Join rank 0 with the rank's part of the model in the folder `model`. Raises ConfigurationError if it refuses."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 ends the group
        signal.signal(number, signal.SIG_IGN)
    log_to_stderr()
    threading.Thread(target=_end_with_parent, name="updraft-pulse", daemon=True).start()
    keep_freed_memory()
    context = zmq.Context[zmq.Socket[bytes]]()
    if meeting.key is not None:
        begin_beats(meeting, context, rank)
    store = RankStore(meeting, context)
    config = _joined(store, rank, model)
    use_device(config.device)
    allow_tf32(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    group = RankGroup(rank, config)
    follower = Follower(load_weights(model, config, group=group), config)
    commands = meeting.connect(context, meeting.commands, zmq.DEALER, rank)
    commands.send(b"")  # ready
    group.connect(store, meeting.interface)
    while True:
        follower.follow(decode(commands.recv()))


def _joined(store: RankStore, rank: int, model: Path) -> EngineConfig:
    match decode(store.join(rank)):
        case Join(config, other):
            if other == fingerprint(model):
                return of_rank(config, rank)
            reason = f"{model} has another configuration or other weights than on the machine of rank 0"
        case Refusal(reason):
            pass
        case other:
            raise TypeError(f"Rank 0 answered {type(other).__name__} to a rank that joins.")
    raise ConfigurationError(f"Rank {rank} cannot join: {reason}.")


def _propose_nothing(_states: Sequence[SlotState], _rows_of: RowsOf) -> None:
    """Propose no drafts: plans have those of rank 0."""


def _no_masks(_slot: int, _draft_ids: Sequence[int]) -> None:
    """Return no mask: only drafters need masks before sampling."""


def _end_with_parent() -> None:
    """Exit at the end of standard input, which is a pipe that only the parent process holds."""
    select.select([sys.stdin.fileno()], [], [])
    os._exit(1)


if __name__ == "__main__":
    main(Meeting.named(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
