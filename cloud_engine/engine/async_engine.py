"""The engine on its own thread, with an asyncio face: one asynchronous iterator per request."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from ...protocol.errors import (
    EngineError,
    EngineRestartedError,
    InvalidRequestError,
    OverloadedError,
    UpdraftError,
)
from .engine import Engine
from .request import GenerationRequest, TokenOutput
from .stats import EngineStats

FAILURES_TO_GIVE_UP = 3
_Event = TokenOutput | UpdraftError
_log = logging.getLogger("updraft.engine")


@dataclass(frozen=True, slots=True)
class _Add:
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Close:
    pass


class AsyncEngine:
    """Owns an Engine. `generate` may be called by any number of tasks of the loop that called `start`.

    A failing step takes everything in flight with it: each request gets an EngineRestartedError with the cause, and
    the engine starts afresh. After `FAILURES_TO_GIVE_UP` steps in a row have failed, `healthy` turns False, `error`
    says why, and later requests are refused at once.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: str | None = None
        self._cause: BaseException | None = None
        self._commands: queue.SimpleQueue[_Add | _Abort | _Close] = queue.SimpleQueue()
        self._events: dict[str, asyncio.Queue[_Event]] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stats = engine.stats()
        self._failures = 0  # steps in a row

    @property
    def healthy(self) -> bool:
        """Whether requests can be served now."""
        return self.error is None and self._thread is not None and self._thread.is_alive()

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="updraft-engine", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Stop after the current step. Requests in flight get an OverloadedError, for another node to take."""
        if self._thread is not None:
            self._commands.put(_Close())
            await asyncio.to_thread(self._thread.join)
            self._thread = None
            self._fail_all()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput]:
        """Outputs of one request, the last of each answer with a finish reason. Closing the iterator aborts it.

        Raises what `Engine.add_request` raises, EngineError if the engine fails, OverloadedError if it is closed.
        """
        if not self.healthy:
            raise self._failure()
        if request.request_id in self._events:
            raise InvalidRequestError(f"Request id {request.request_id!r} is in use.", param="request_id")
        events = self._events[request.request_id] = asyncio.Queue[_Event]()
        self._commands.put(_Add(request))
        unfinished = request.n
        try:
            while unfinished:
                event = await events.get()
                if isinstance(event, UpdraftError):
                    unfinished = 0
                    raise event
                unfinished -= event.finish_reason is not None
                yield event
        finally:
            del self._events[request.request_id]
            if unfinished:
                self._commands.put(_Abort(request.request_id))

    def stats(self) -> EngineStats:
        """As of the last step or command."""
        return self._stats

    # The engine's thread.

    def _run(self) -> None:
        try:
            while self._obey_commands():
                self._step()
        except BaseException as error:  # noqa: BLE001 - whatever it was, everyone waiting must hear of it
            self._cause = error
            self.error = f"{type(error).__name__}: {error}"
            self._call_soon(self._fail_all)

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:
            self._failures += 1
            if self._failures == FAILURES_TO_GIVE_UP:
                raise
            _log.exception("A step of the engine failed; its requests are lost, the engine starts afresh.")
            lost = self.engine.reset()
            self._stats = self.engine.stats()
            self._call_soon(self._fail, lost, _failure_of(error, "ask again", EngineRestartedError))
        else:
            self._failures = 0
            self._stats = self.engine.stats()
            self._call_soon(self._deliver, outputs)

    def _obey_commands(self) -> bool:
        """Carry out what was asked since the last step, and wait until there is work. False: close."""
        while not (self._commands.empty() and self.engine.has_work):
            command = self._commands.get()
            if isinstance(command, _Close):
                return False
            if isinstance(command, _Abort):
                self.engine.abort(command.request_id)
            else:
                self._add(command.request)
            self._stats = self.engine.stats()
        return True

    def _add(self, request: GenerationRequest) -> None:
        try:
            self.engine.add_request(request)
        except UpdraftError as error:  # this request's own fault; the others go on
            self._call_soon(self._put, request.request_id, error)
        except Exception as error:  # noqa: BLE001 - told to who asked, and the engine lives on
            _log.exception("A request could not be taken in.")
            self._call_soon(self._put, request.request_id, _failure_of(error, "ask differently"))

    def _call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *arguments)

    # The event loop's thread.

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            self._put(output.request_id, output)

    def _put(self, request_id: str, event: _Event) -> None:
        if request_id in self._events:  # else its reader has gone, and the abort is on its way
            self._events[request_id].put_nowait(event)

    def _fail(self, request_ids: list[str], failure: UpdraftError) -> None:
        for request_id in request_ids:
            self._put(request_id, failure)

    def _fail_all(self) -> None:
        self._fail(list(self._events), self._failure())

    def _failure(self) -> UpdraftError:
        if self._cause is None:
            return OverloadedError("The engine is shutting down: try again, another node may take it.")
        return _failure_of(self._cause, "restart the node")


def _failure_of(cause: BaseException, advice: str, kind: type[EngineError] = EngineError) -> EngineError:
    failure = kind(f"The engine failed ({type(cause).__name__}: {cause}): {advice}.")
    failure.__cause__ = cause
    return failure
