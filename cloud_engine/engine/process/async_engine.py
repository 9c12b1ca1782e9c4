"""The engine on a thread of this process: for embedding it, and for tests. Nodes use `EngineProcess`."""

from __future__ import annotations

import queue

from ....protocol.errors import EngineDownError
from ..engine import Engine
from .client import EngineClient
from .loop import EngineLoop
from .messages import Close, Command, Report, last_words
from .transport import CoreTransport


class AsyncEngine(EngineClient, CoreTransport):
    """Owns an Engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def _send(self, command: Command) -> None:
        self._commands.put(command)

    def _stop(self) -> None:
        self._commands.put(Close())

    def _run(self) -> None:
        try:
            EngineLoop(self.engine, self).run()
        except BaseException as error:  # noqa: BLE001 - whatever it was, everyone waiting must hear of it
            cause = last_words(error).error
            failure = EngineDownError(
                f"The engine is down ({cause.message}). Another node may take the request; restart this one."
            )
            failure.__cause__ = error
            self._call_soon(self._refuse, failure)

    def next_command(self, wait: bool) -> Command | None:
        try:
            return self._commands.get(block=wait)
        except queue.Empty:
            return None

    def report(self, what: Report) -> None:
        self._call_soon(self._receive, what)

    def send_back(self, command: Command) -> None:
        self._commands.put(command)
