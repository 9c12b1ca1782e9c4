"""Rank 0's side of a group: it starts the ranks of its machine, tells all what to do, and ends when one ends."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import zmq

from ....protocol.errors import EngineError
from ....protocol.safety.system import socket_folder
from ..config import EngineConfig
from ..rank_messages import Join, encode
from .group import RankGroup
from .machine import start_ranks
from .meeting import Meeting, fingerprint, routing_id
from .store import LOST_S, RankStore, StoreServer

_POLL_MS = 100
_REMIND_S = 30.0
_BROKEN = 70  # exit code, as EX_SOFTWARE of sysexits.h
_T = TypeVar("_T")
_log = logging.getLogger("updraft.engine")


class Leader(RankGroup):
    """Rank 0. The constructor starts the other ranks, which load their parts of the model at the same time.

    The ranks of this machine end with this process, because it holds the other end of their standard input.
    """

    def __init__(self, model: Path, config: EngineConfig) -> None:
        """Start the ranks for the model in the folder `model`. Raises ConfigurationError if they cannot meet."""
        super().__init__(0, config)
        self._ending = False
        self._missing = set(range(1, config.num_ranks))
        self._folder = socket_folder("updraft-ranks-", "commands")
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        atexit.register(self._kill)
        self._meeting = Meeting(str(self._folder)) if config.nnodes == 1 else Meeting.of_machines(config)
        self._context = zmq.Context()
        self._authenticator = self._meeting.authenticator(self._context)
        self._commands = self._meeting.bind(self._context, self._meeting.commands)
        self._routing_ids = [routing_id(rank) for rank in self._missing]
        StoreServer(self._meeting, self._context, Join(config, fingerprint(model)), self._end_without)
        self._ranks = start_ranks(self._meeting, [rank for rank in config.own_ranks if rank], model)

    def begin(self, load: Callable[[], _T]) -> _T:
        """Load rank 0's part by `load`, wait for the parts of all others, and connect the ranks.

        Raises the errors of `load`, and EngineError if a rank ends. The ranks of this machine are then killed.
        """
        try:
            loaded = load()
            self._wait_and_connect()
        except BaseException:
            self._kill()
            raise
        return loaded

    def _wait_and_connect(self) -> None:
        reminded = time.monotonic()
        while self._missing:
            if self._commands.poll(_POLL_MS):
                sender, _ = self._commands.recv_multipart()
                self._missing -= {rank for rank in self._missing if routing_id(rank) == sender}
                continue
            for rank, process in self._ranks.items():
                if process.poll() is not None:
                    raise EngineError(f"Rank {rank} ended with code {process.returncode} while loading its part.")
            if time.monotonic() - reminded > _REMIND_S:
                reminded = time.monotonic()
                _log.warning("Waiting for ranks %s.", ", ".join(map(str, sorted(self._missing))))
        for rank, process in self._ranks.items():
            threading.Thread(target=self._end_with, args=(rank, process), name="updraft-rank", daemon=True).start()
        self.connect(RankStore(self._meeting, self._context), self._meeting.interface)
        shutil.rmtree(self._folder, ignore_errors=True)  # all sockets are connected

    def tell(self, message: object) -> None:
        """Raises EngineError if a rank is gone."""
        data = encode(message)
        try:
            for rank in self._routing_ids:
                self._commands.send_multipart((rank, data))
        except zmq.ZMQError as error:
            raise EngineError("A rank is gone.") from error

    def _end_with(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """End this process as soon as a rank has ended: the group's work is lost, and the server starts it again."""
        code = process.wait()
        if not self._ending:
            self._end(f"Rank {rank} ended with code {code}")

    def _end_without(self, rank: int) -> None:
        self._end(f"Rank {rank} was silent for {LOST_S:.0f} s")

    def _end(self, why: str) -> None:
        _log.critical("%s, so its group ends.", why)
        self._kill()
        os._exit(_BROKEN)

    def _kill(self) -> None:
        """Kill the ranks, also those that hang, and remove the folder of a group that did not begin."""
        self._ending = True
        for process in self._ranks.values():
            process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
