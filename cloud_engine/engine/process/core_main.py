"""Main module of the engine core process: `python -m ...core_main FOLDER` runs an engine over two sockets in FOLDER.

The process holds no state to save, so it exits at once if the server asks for this or has ended.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

import zmq

from ....kernels.runtime.host_memory import keep_freed_memory
from ....protocol.errors import MissingDependencyError, UpdraftError
from ....protocol.safety.system import socket_address
from ....protocol.telemetry.logs import log_to_stderr
from .core_process import COMMANDS, HEARTBEAT_S, REPORTS
from .messages import (
    AliveReport,
    Command,
    CoreTransport,
    Load,
    LoadProgress,
    ReadyReport,
    Report,
    decode_command,
    down_report,
    encode_command,
    encode_report,
)

if TYPE_CHECKING:
    from ...models.loading.loader import Progress
    from ..engine import Engine

_SOCKET_LINGER_MS = 1000
_log = logging.getLogger("updraft.engine")


class _Sockets(CoreTransport):
    """The core's side of the sockets in `folder`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        self._context = context
        self._address = socket_address(folder / COMMANDS)
        self._commands = context.socket(zmq.PULL)
        self._commands.bind(self._address)
        self._reports = context.socket(zmq.PUSH)
        self._reports.sndhwm = 0  # unlimited, because a step must never wait for the server
        self._reports.linger = _SOCKET_LINGER_MS
        self._reports.connect(socket_address(folder / REPORTS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._commands.close()
        self._reports.close()

    def next_command(self, wait: bool) -> Command | None:
        return decode_command(self._commands.recv()) if wait or self._commands.poll(0) else None

    def report(self, what: Report) -> None:
        self._reports.send(encode_report(what))

    def send_back(self, command: Command) -> None:
        with self._context.socket(zmq.PUSH) as back:  # a new socket, because each thread needs its own
            back.linger = _SOCKET_LINGER_MS
            back.connect(self._address)
            back.send(encode_command(command))


def main(folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # ignore both signals: the server gets them too, and stops the core
        signal.signal(number, signal.SIG_IGN)
    log_to_stderr()
    logging.getLogger("updraft").setLevel(logging.INFO)  # show the choices made at startup
    threading.Thread(target=_send_heartbeats, args=(folder,), name="updraft-pulse", daemon=True).start()
    with zmq.Context() as context, _Sockets(context, folder) as transport:
        try:
            load = transport.next_command(True)
            assert isinstance(load, Load), "the first command to an engine core is Load"
            engine = _engine(load, lambda done, total: transport.report(LoadProgress(done, total)))
            from ..worker.devices import yields_to_other_processes
            from .loop import EngineLoop

            gc.collect()
            gc.freeze()  # exclude loaded objects from garbage collection, which would delay steps
            transport.report(ReadyReport(engine.model_id, engine.context_length, engine.sampling))
            EngineLoop(engine, transport, before_step=yields_to_other_processes(load.config)).run()
        except BaseException as error:  # noqa: BLE001 - the server reports any failure to all waiting requests
            if not isinstance(error, UpdraftError):
                _log.exception("The engine core failed.")
            transport.report(down_report(error))


def _engine(load: Load, progress: Progress) -> Engine:
    """Load the engine. Raises the errors of `Engine.from_folder`, and MissingDependencyError without torch."""
    try:
        from ..engine import Engine
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependencyError("A node needs torch: pip install '.[cloud]' in a clone of Updraft") from error

    keep_freed_memory()
    draft = Path(load.draft) if load.draft is not None else None
    engine = Engine.from_folder(Path(load.folder), draft=draft, config=load.config, progress=progress)
    used = (load.config.max_num_seqs, load.config.max_num_batched_tokens, load.config.max_step_ms or "none")
    _log.info("limits: --max-num-seqs %d --max-num-batched-tokens %d --max-step-ms %s", *used)
    return engine


def _send_heartbeats(folder: Path) -> None:
    """Send heartbeats to the server, and exit as soon as the server is gone.

    Standard input is a pipe that only the server holds, so end of file means that the server process has ended.
    """
    with zmq.Context() as context, context.socket(zmq.PUSH) as reports:
        reports.connect(socket_address(folder / REPORTS))
        while not select.select([sys.stdin.fileno()], [], [], HEARTBEAT_S)[0]:
            reports.send(encode_report(AliveReport()))
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
