"""Rank 0's side of a group: it starts the other ranks, tells them what to do, and ends when one of them ends."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import zmq

from ....protocol.errors import ConfigurationError, EngineError
from ....protocol.safety.system import child_environment, python_command, socket_address, socket_folder
from ..config import EngineConfig
from ..rank_messages import Join, encode
from .group import RankGroup, loopback

READY = "ready"
_POLL_MS = 100
_BROKEN = 70  # exit code, as EX_SOFTWARE of sysexits.h
_T = TypeVar("_T")
_log = logging.getLogger("updraft.engine")


def commands_of(rank: int) -> str:
    """Return the name of the socket on which a rank receives messages."""
    return f"rank-{rank}"


class Leader(RankGroup):
    """Rank 0. The constructor starts the other ranks, which load their parts of the model at the same time.

    The ranks end with this process, because it holds the other end of their standard input.
    """

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        """Start the ranks for the model in `folder`. `config` is rank 0's, by `of_rank`."""
        super().__init__(0, config)
        self._num_ranks = config.num_ranks
        self._device = config.device
        self._ending = False
        self._folder = socket_folder("updraft-ranks-", commands_of(self._num_ranks))
        self._context = zmq.Context()
        self._ready = self._context.socket(zmq.PULL)
        self._ready.bind(socket_address(self._folder / READY))
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._commands: list[zmq.Socket[bytes]] = []
        os.environ.update(loopback())
        atexit.register(self._kill)
        for rank in range(1, self._num_ranks):
            commands = self._context.socket(zmq.PUSH)
            commands.set_hwm(0)  # unlimited: rank 0 is at most two steps ahead
            commands.bind(socket_address(self._folder / commands_of(rank)))
            self._commands.append(commands)
            command = python_command("-m", f"{__package__}.follower", str(self._folder), str(rank))
            self._ranks.append(subprocess.Popen(command, env=child_environment(), stdin=subprocess.PIPE))
            commands.send(encode(Join(str(folder), of_rank(config, rank), rank)))

    def begin(self, load: Callable[[], _T]) -> _T:
        """Load rank 0's part by `load`, wait for the parts of all others, and connect the ranks.

        Raises the errors of `load`, and EngineError if a rank ends. The other ranks are then killed.
        """
        try:
            loaded = load()
            self._wait_and_connect()
        except BaseException:
            self._kill()
            raise
        return loaded

    def _wait_and_connect(self) -> None:
        missing = self._num_ranks - 1
        while missing:
            if self._ready.poll(_POLL_MS):
                self._ready.recv()
                missing -= 1
                continue
            for rank, process in enumerate(self._ranks, 1):
                if process.poll() is not None:
                    raise EngineError(f"Rank {rank} ended with code {process.returncode} while loading its part.")
        self.connect(self._folder, self._device)
        shutil.rmtree(self._folder, ignore_errors=True)  # all sockets are connected
        for rank, process in enumerate(self._ranks, 1):
            threading.Thread(target=self._end_with, args=(rank, process), name="updraft-rank", daemon=True).start()

    def tell(self, message: object) -> None:
        data = encode(message)
        for commands in self._commands:
            commands.send(data)

    def _end_with(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """End this process as soon as a rank has ended: the group's work is lost, and the server starts it again."""
        code = process.wait()
        if self._ending:
            return
        _log.critical("Rank %d ended with code %d, so its group ends.", rank, code)
        self._kill()
        os._exit(_BROKEN)

    def _kill(self) -> None:
        """Kill the ranks, also those that hang, and remove the folder of a group that did not begin."""
        self._ending = True
        for process in self._ranks:
            process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """Return a rank's configuration: its GPU, or its share of this machine's threads.

    Raises ConfigurationError if the configuration names a single GPU.
    """
    if ":" in config.device:
        fault = f"{config.num_ranks} ranks use as many GPUs: set device to cuda instead of {config.device}."
        raise ConfigurationError(fault, param="device")
    if config.device != "cpu":
        return replace(config, device=f"cuda:{rank}")
    threads = config.threads or max(1, torch.get_num_threads() // config.tensor_parallel)
    return replace(config, threads=threads)
