"""An engine on a thread of the test process, where tests can hold its steps. Nodes use `EngineProcess` instead."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable

from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.process.client import EngineClient
from updraft.cloud_engine.engine.process.loop import EngineLoop
from updraft.cloud_engine.engine.process.messages import Close, Command, CoreTransport, Report, down_report
from updraft.protocol.errors import EngineDownError


class ThreadedEngine(EngineClient, CoreTransport):
    """Runs an engine on a thread, with the interface of `EngineClient`."""

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
            cause = down_report(error).error
            failure = EngineDownError(
                f"The engine is down ({cause.message}). Send the request to another node, and restart this one."
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


def with_engine(engine: Engine, scenario: Callable[[ThreadedEngine], Awaitable[None]]) -> None:
    """Run `scenario` on a started engine, which is closed afterwards."""

    async def main() -> None:
        served = ThreadedEngine(engine)
        await served.start()
        try:
            await asyncio.wait_for(scenario(served), 60)
        finally:
            await served.close()

    asyncio.run(main())
