"""The local tier: a synchronous engine on its own thread, seen by the event loop as an async iterator of tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..protocol.errors import EngineError, UpdraftError
from ..protocol.requests import Message
from ..protocol.responses import FinishReason
from ..protocol.sampling import SamplingParams
from .tiers import LocalAnswer, Token

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..classifier.views import Signals


class EngineRun(Protocol):
    """`local_engine.LocalRun`, as far as the router uses it."""

    prompt_tokens: int
    signals: Any
    text: str
    finish_reason: FinishReason | None
    prompt_hidden: NDArray[np.float32]
    prompt_logprobs: NDArray[np.float32]
    answer_hidden: NDArray[np.float32] | None

    def __iter__(self) -> Iterator[Any]: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class EngineLike(Protocol):
    """`local_engine.LocalEngine`, as far as the router uses it."""

    model_id: str

    def start(
        self, messages: Sequence[Message], params: SamplingParams, *, continue_final_message: bool = False
    ) -> Any: ...
    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes: ...
    def close(self) -> None: ...


class EngineLocalTier:
    """`LocalTier` over one engine. Requests take turns: the device has one model and one set of cores."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="updraft-local")
        self._turn = asyncio.Semaphore(1)
        self._closed = False

    @property
    def model_id(self) -> str:
        return self._engine.model_id

    async def start(
        self, messages: Sequence[Message], params: SamplingParams, *, continue_final_message: bool = False
    ) -> EngineGeneration:
        await self._turn.acquire()
        generation = EngineGeneration(self._thread, on_end=self._turn.release)
        try:
            await generation.launch(
                lambda: self._engine.start(messages, params, continue_final_message=continue_final_message)
            )
        except BaseException:
            await generation.aclose()
            raise
        return generation

    def token_bytes(self, token_id: int) -> bytes:
        return self._engine.token_bytes(token_id, skip_special=False)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            # Not on an executor: at interpreter exit those take no more work. The engine waits for a step at most.
            self._engine.close()
            self._thread.shutdown(wait=True)


@dataclass(frozen=True, slots=True)
class _End:
    """The worker's last word: what went wrong, or the finished run's own record, or neither after a cancellation."""

    error: BaseException | None = None
    signals: tuple[Signals, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    answer_hidden: NDArray[np.float32] | None = None

    @staticmethod
    def of(run: EngineRun) -> _End:
        return _End(None, tuple(run.signals), run.text, run.finish_reason, run.answer_hidden)


class EngineGeneration:
    """`LocalGeneration`: the worker thread decodes ahead, the event loop takes tokens from a queue."""

    def __init__(self, thread: ThreadPoolExecutor, *, on_end: Callable[[], None]) -> None:
        self.answer = LocalAnswer()
        self._thread = thread
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[Token, EngineRun] | _End] = asyncio.Queue()
        self._cancelled = threading.Event()
        self._run: EngineRun | None = None
        self._worker: asyncio.Future[None] | None = None
        self._finished = False
        self._closed = False

    async def launch(self, start: Callable[[], EngineRun]) -> None:
        """Tokenize and prepare on the worker thread; raises what the engine raises."""
        started: asyncio.Future[int] = self._loop.create_future()
        self._worker = self._loop.run_in_executor(self._thread, self._work, start, started)
        self.answer.prompt_tokens = await started

    def __aiter__(self) -> EngineGeneration:
        return self

    async def __anext__(self) -> Token:
        if self._finished:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, _End):
            self._finish(item)
            raise StopAsyncIteration
        token, run = item
        answer = self.answer
        if not answer.tokens:
            answer.prompt_hidden, answer.prompt_logprobs = run.prompt_hidden, run.prompt_logprobs
        answer.tokens.append(token)
        answer.signals.append(token.signals)
        answer.text += token.text
        return token

    async def aclose(self) -> None:
        """Stop the decoding and wait until the worker has let go of the engine. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._finished = True
        self._cancelled.set()
        if self._run is not None:
            self._run.cancel()
        if self._worker is not None:
            await asyncio.shield(self._worker)

    def _work(self, start: Callable[[], EngineRun], started: asyncio.Future[int]) -> None:
        """Worker thread. The turn passes on when the work is over, so that an abandoned stream blocks nobody."""
        try:
            if not self._cancelled.is_set():
                self._decode(start, started)
        finally:
            self._tell(self._on_end)

    def _decode(self, start: Callable[[], EngineRun], started: asyncio.Future[int]) -> None:
        """The run from its start to its close, token by token into the queue."""
        try:
            run = start()
        except BaseException as error:  # noqa: BLE001 - carried to the caller, who raises it
            self._tell(_fail, started, error)
            return
        self._run = run
        end = _End()
        try:
            self._tell(_succeed, started, run.prompt_tokens)
            for token in run:
                self._tell(self._queue.put_nowait, (token, run))
                if self._cancelled.is_set():
                    break
            else:
                end = _End.of(run)
        except BaseException as error:  # noqa: BLE001 - carried to the caller, who raises it
            end = _End(error)
        finally:
            run.close()
            self._tell(self._queue.put_nowait, end)

    def _finish(self, end: _End) -> None:
        self._finished = True
        if isinstance(end.error, UpdraftError):
            raise end.error
        if end.error is not None:
            raise EngineError(f"The local model failed: {end.error}") from end.error
        if end.finish_reason is not None:
            answer = self.answer
            answer.signals, answer.text = list(end.signals), end.text
            answer.finish_reason, answer.answer_hidden = end.finish_reason, end.answer_hidden

    def _tell(self, call: Callable[..., object], *arguments: Any) -> None:
        """Run `call` on the event loop; a loop that is gone has nobody left to tell."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)


def _succeed(future: asyncio.Future[int], value: int) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[int], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
