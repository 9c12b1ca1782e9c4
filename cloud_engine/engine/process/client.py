"""The asyncio client of an engine in another thread or process: one output iterator per request."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from itertools import chain

from ....protocol.errors import InvalidRequestError, OverloadedError, UpdraftError
from ..stats import EngineStats
from ..types.outputs import TokenOutput
from ..types.request import GenerationRequest
from .messages import Abort, Add, Command, FailureReport, OutputReport, Report

_Event = TokenOutput | UpdraftError


class EngineClient(ABC):
    """Asyncio client of an engine. Call `generate` from any task, but in the event loop in which `start` was called.

    A thread (`_run`) passes the engine's reports to that loop. If the engine ends for any reason, all requests in
    flight fail with the error, and new requests are refused at once with `failure`.
    """

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Queue[_Event]] = {}
        self._unanswered: set[str] = set()  # requests without any output yet
        self._refusal: UpdraftError | None = OverloadedError("The engine has not been started. Call start() first.")
        self._stats = EngineStats()
        self._reported_at = time.monotonic()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def failure(self) -> UpdraftError | None:
        """The error that new requests get; None while the engine serves."""
        return None if self._refusal is None else _copy_of(self._refusal)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._serve()
        self._thread = threading.Thread(target=self._run, name="updraft-engine", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Stop after the current step. Requests in flight fail with OverloadedError, so that another node can retry."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            refusal = "The engine is shutting down. Retry: another node may serve the request."
            self._refuse(OverloadedError(refusal, code="draining"))
            await asyncio.to_thread(self._stop)
            await asyncio.to_thread(thread.join)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput]:
        """Yield outputs until each answer of the request has a finish reason. Closing the generator aborts the request.

        Raises the errors of `Engine.add_request`, EngineError if the engine fails, OverloadedError after `close`.
        """
        if self._refusal is not None:
            raise _copy_of(self._refusal)
        if request.request_id in self._events:
            raise InvalidRequestError(f"Request id {request.request_id!r} is in use.", param="request_id")
        if not self._has_work:
            self._reported_at = time.monotonic()  # start the clock now: an idle engine sends no reports
        self._send(Add(request))
        self._unanswered.add(request.request_id)
        events = self._events[request.request_id] = asyncio.Queue[_Event]()
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
            self._unanswered.discard(request.request_id)
            if unfinished:
                self._send(Abort(request.request_id))

    def stop_answer(self, request_id: str, index: int) -> None:
        """Stop generating one answer of a request; the request's other answers continue."""
        self._send(Abort(request_id, index))

    def stats(self) -> EngineStats:
        """Return the latest reported statistics, which are some milliseconds old or from before the current step."""
        since_step = time.monotonic() - self._reported_at if self._has_work else 0.0
        return replace(self._stats, seconds_since_step=since_step)

    @property
    def _has_work(self) -> bool:
        """Return whether the engine has unfinished requests, even if its statistics do not show them yet."""
        return bool(self._unanswered) or self._stats.running + self._stats.waiting > 0

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Send a command to the engine without waiting."""

    @abstractmethod
    def _run(self) -> None:
        """Run in the thread: pass reports to the loop (`_call_soon`) until `_stop` is called or the engine is down."""

    @abstractmethod
    def _stop(self) -> None:
        """Make `_run` return. May block; `close` calls this in another thread."""

    def _call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *arguments)

    # The methods below run in the event loop's thread.

    def _receive(self, report: Report) -> None:
        match report:
            case OutputReport(steps, stats):
                self._stats, self._reported_at = stats, time.monotonic()
                for output in chain.from_iterable(steps):
                    self._put(output.request_id, output)
            case FailureReport(request_ids, error):
                for request_id in request_ids:
                    self._put(request_id, error)
            case _:
                raise TypeError(f"Unexpected report of a running engine: {type(report).__name__}.")

    def _put(self, request_id: str, event: _Event) -> None:
        self._unanswered.discard(request_id)
        if request_id in self._events:  # otherwise `generate` has ended and sent an abort
            self._events[request_id].put_nowait(event)

    def _serve(self) -> None:
        self._refusal = None

    def _refuse(self, error: UpdraftError) -> None:
        """Stop serving: all requests in flight and all later requests fail with `error`."""
        self._refusal, self._stats = error, EngineStats()
        for request_id in self._events:
            self._put(request_id, _copy_of(error))


def _copy_of(error: UpdraftError) -> UpdraftError:
    """Return a copy to raise: raising the same error repeatedly would grow its traceback."""
    copy = type(error)(error.message, param=error.param, code=error.code)
    copy.__cause__ = error.__cause__
    return copy
