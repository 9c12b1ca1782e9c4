"""A machine after machine 0: it runs its ranks of a model, and no server."""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from ....protocol.errors import EngineDownError
from ....protocol.safety.system import END_SIGNALS, child_environment, python_command
from ....protocol.telemetry.logs import log_to_stderr
from ..config import EngineConfig
from .meeting import Meeting

_LOOK_S = 0.1
_PAUSE_S = 1.0  # seconds until ranks start again
_log = logging.getLogger("updraft.engine")


def run_machine(model: Path, config: EngineConfig, *, restart: bool) -> None:
    """Run this machine's ranks of the model in the folder `model` until SIGTERM, SIGHUP or SIGINT.

    When one of them ends, the others end, too: rank 0's group is broken. With `restart`, they start again, and wait for
    rank 0 to return. Raises EngineDownError without, and ConfigurationError.
    """
    log_to_stderr()
    meeting = Meeting.of_machines(config)
    for number in END_SIGNALS:
        signal.signal(number, _interrupt)
    _log.info("Machine %d of %d waits for rank 0 at %s.", config.node_rank + 1, config.nnodes, meeting.place)
    with suppress(KeyboardInterrupt):
        while True:
            processes = start_ranks(meeting, config.own_ranks, model)
            try:
                code = _first_code(list(processes.values()))
            finally:
                for process in processes.values():
                    process.kill()
                    process.wait()
            if not restart:
                raise EngineDownError(f"A rank of this machine ended with code {code}. --restart starts it again.")
            _log.error("A rank ended with code %d: the ranks of this machine start again.", code)
            time.sleep(_PAUSE_S)


def start_ranks(meeting: Meeting, ranks: Iterable[int], model: Path) -> dict[int, subprocess.Popen[bytes]]:
    """Start ranks on this machine. They end when their standard input is closed."""
    follower = f"{__package__}.follower"
    return {
        rank: subprocess.Popen(
            python_command("-m", follower, meeting.place, str(rank), str(model)),
            env=child_environment(),
            stdin=subprocess.PIPE,
        )
        for rank in ranks
    }


def _first_code(processes: list[subprocess.Popen[bytes]]) -> int:
    while True:
        for process in processes:
            if (code := process.poll()) is not None:
                return code
        time.sleep(_LOOK_S)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
