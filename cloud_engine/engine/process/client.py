"""The asyncio client of an engine in another thread or process: one output iterator per request."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from itertools import chain

from ....protocol.errors import ConflictError, EngineDownError, InvalidRequestError, OverloadedError, UpdraftError
from ..stats import EngineStats
from ..types.outputs import TokenOutput
from ..types.request import GenerationRequest, Resumption
from .messages import (
    Abort,
    Add,
    Command,
    FailureReport,
    OutputReport,
    Report,
    Sleep,
    SleepReport,
    StepFailureReport,
)
from .recovery import CLEARING_TOKENS, Recovery

_Event = TokenOutput | UpdraftError


class EngineClient(ABC):
    """Asyncio client of an engine. Call `generate` from any task, but in the event loop in which `start` was called.

    A thread (`_run`) passes the engine's reports to that loop. After a failed step, all requests return to the engine
    with their tokens so far (`Recovery`). If the engine ends for any reason, all requests in flight fail with the
    error, and new requests are refused at once with `failure`.
    """

    def __init__(self) -> None:
        self._in_flight: dict[str, _InFlight] = {}
        self._unanswered: set[str] = set()  # requests without any output yet
        self._recovery = Recovery()
        self._is_running = False  # the engine takes requests, at least those in flight
        self._idle = asyncio.Event()  # no request is in flight
        self._idle.set()
        self._transition = asyncio.Lock()  # held while the engine falls asleep or wakes up
        self._settled: asyncio.Future[None] | None = None  # the end of the transition
        self.sleep_level = 0
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

        Raises the errors of `Engine.add_request`, RequestFailedError if the engine fails on this request alone,
        EngineError if the engine fails, OverloadedError after `close`.
        """
        if self._refusal is not None:
            raise _copy_of(self._refusal)
        if request.request_id in self._in_flight:
            raise InvalidRequestError(f"Request id {request.request_id!r} is in use.", param="request_id")
        if not self._has_work:
            self._reported_at = time.monotonic()  # start the clock now: an idle engine sends no reports
        is_held = self._recovery.is_active
        if is_held:
            self._recovery.hold(request.request_id)
        else:
            self._send(Add(request))
        self._unanswered.add(request.request_id)
        this = self._in_flight[request.request_id] = _InFlight(request, was_sent=not is_held)
        self._idle.clear()
        unfinished = request.n
        try:
            while unfinished:
                event = await this.events.get()
                if isinstance(event, UpdraftError):
                    unfinished = 0
                    raise event
                unfinished -= event.finish_reason is not None
                yield event
        finally:
            del self._in_flight[request.request_id]
            if not self._in_flight:
                self._idle.set()
            self._unanswered.discard(request.request_id)
            if unfinished:
                self._send(Abort(request.request_id))
            self._clear(request.request_id)

    def stop_answer(self, request_id: str, index: int) -> None:
        """Stop generating one answer of a request; the request's other answers continue."""
        self._send(Abort(request_id, index))
        if request_id in self._in_flight:
            self._in_flight[request_id].token_ids.pop(index, None)

    async def sleep(self, level: int, drain_s: float) -> None:
        """Release memory until `wake`: on level 1 the KV cache and a GPU's weights, on level 2 all by ending the core.

        New requests are refused with the code `sleeping`; requests in flight finish first. Raises ConflictError if
        they take longer than `drain_s` seconds or the engine sleeps at another level; the engine then stays as it was.
        """
        async with self._transition:
            if self.sleep_level == level:
                return
            if self.sleep_level:
                raise ConflictError(f"The node sleeps at level {self.sleep_level}. Wake it up first: POST /wake_up.")
            if self._refusal is not None:
                raise _copy_of(self._refusal)
            asleep = self._refusal = OverloadedError("The node sleeps. Use another node.", code="sleeping")
            try:
                await asyncio.wait_for(self._idle.wait(), drain_s)
            except (TimeoutError, asyncio.CancelledError) as error:
                if self._refusal is asleep:
                    self._serve()
                if isinstance(error, asyncio.CancelledError):
                    raise
                count = len(self._in_flight)
                raise ConflictError(f"{count} requests are in flight after {drain_s:g} s. Try again later.") from None
            if self._refusal is asleep:
                await self._settle(level, asleep=True)
            if self._refusal is not asleep:  # the engine failed, or is shutting down
                raise self.failure or EngineDownError("The engine restarted while falling asleep. Try again.")
            self.sleep_level = level

    async def wake(self) -> None:
        """Serve again after `sleep`. Raises the error of an engine that cannot start."""
        async with self._transition:
            if self.sleep_level:
                level, self.sleep_level = self.sleep_level, 0
                await self._settle(level, asleep=False)
            if self._refusal is not None:
                raise _copy_of(self._refusal)

    async def _settle(self, level: int, *, asleep: bool) -> None:
        """Begin a transition, and wait until the engine has reported its end or is down."""
        self._settled = asyncio.get_running_loop().create_future()
        self._begin_transition(level, asleep=asleep)
        await self._settled

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

    def _begin_transition(self, level: int, *, asleep: bool) -> None:
        """Make the engine fall asleep or wake up without waiting. Its end is reported by `_end_transition`."""
        del level
        self._send(Sleep(asleep))

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
                    if self._recovery.trial and self._is_cleared(output.request_id):
                        self._clear(output.request_id)
            case StepFailureReport(lost, suspects, error):
                self._recover(lost, suspects, error)
            case FailureReport(request_ids, error):
                for request_id in request_ids:
                    self._put(request_id, error)
            case SleepReport(asleep):
                self._end_transition() if asleep else self._serve()
            case _:
                raise TypeError(f"Unexpected report of a running engine: {type(report).__name__}.")

    def _put(self, request_id: str, event: _Event) -> None:
        self._unanswered.discard(request_id)
        if request_id in self._in_flight:  # otherwise `generate` has ended and sent an abort
            self._in_flight[request_id].put(event)

    def _serve(self) -> None:
        self._refusal, self._is_running = None, True
        self._end_transition()
        self._send_returning()

    def _end_transition(self) -> None:
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)

    def _recover(self, lost: Sequence[str], suspects: Sequence[str], error: UpdraftError) -> None:
        """Send the requests again that the engine has `lost`, in the groups of `Recovery`. The culprit gets `error`."""
        culprit = self._recovery.failed(lost, suspects)
        if culprit is not None:
            self._put(culprit, error)
        self._send_returning()

    def _send_returning(self) -> None:
        for request_id in self._recovery.returning(self._is_unfinished) if self._is_running else ():
            this = self._in_flight[request_id]
            self._unanswered.add(request_id)
            try:
                self._send(Add(this.resumed()))
            except UpdraftError as error:
                self._put(request_id, error)

    def _is_unfinished(self, request_id: str) -> bool:
        return request_id in self._in_flight and bool(self._in_flight[request_id].token_ids)

    def _is_cleared(self, request_id: str) -> bool:
        return not self._is_unfinished(request_id) or self._in_flight[request_id].num_new_tokens >= CLEARING_TOKENS

    def _clear(self, request_id: str) -> None:
        """End the trial of a request. If all suspects in the engine are cleared, the next ones follow."""
        if request_id in self._recovery.trial:
            self._recovery.trial.remove(request_id)
            self._send_returning()

    def _refuse(self, error: UpdraftError) -> None:
        """Stop serving: all requests in flight and all later requests fail with `error`."""
        self._refusal, self._stats, self._recovery = error, EngineStats(), Recovery()
        self.sleep_level, self._is_running = 0, False
        self._end_transition()
        for request_id in self._in_flight:
            self._put(request_id, _copy_of(error))


class _InFlight:
    """A request with its events, and with the part of its answers that has been received."""

    def __init__(self, request: GenerationRequest, *, was_sent: bool) -> None:
        self._request = request
        self._was_sent = was_sent
        self.events = asyncio.Queue[_Event]()
        self.token_ids: dict[int, list[int]] = {index: [] for index in range(request.n)}  # of unfinished answers
        self.num_new_tokens = 0  # tokens since the request was sent to the engine
        self._cached_tokens = 0

    def put(self, event: _Event) -> None:
        self.events.put_nowait(event)
        if isinstance(event, UpdraftError):
            return
        self.num_new_tokens += len(event.token_ids)
        self._cached_tokens = event.cached_tokens or self._cached_tokens
        if event.finish_reason is not None:
            self.token_ids.pop(event.index, None)
        elif event.index in self.token_ids:
            self.token_ids[event.index] += event.token_ids

    def resumed(self) -> GenerationRequest:
        """Return the request for the engine, so that it continues where the client's answers end."""
        resumption = Resumption(self.token_ids, self._cached_tokens) if self._was_sent else None
        self._was_sent, self.num_new_tokens = True, 0
        return replace(self._request, resumed=resumption)


def _copy_of(error: UpdraftError) -> UpdraftError:
    """Return a copy to raise: raising the same error repeatedly would grow its traceback."""
    copy = type(error)(error.message, param=error.param, code=error.code)
    copy.__cause__ = error.__cause__
    return copy
