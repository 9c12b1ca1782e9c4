"""Local tier that unloads its model when idle and reloads it for the next request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, Unpack

from ...protocol.errors import ConfigurationError, OverloadedError, UpdraftError
from ...protocol.prompts import Prompt
from ...protocol.requests import Message
from ...protocol.sampling import SamplingParams
from ...protocol.structured import AnswerOptions, Constraint
from ...text.tokenization import TextEncoder
from .interfaces import LocalAnswer, LocalGeneration, LocalTier, Token
from .load_backoff import LoadBackoff
from .local import EngineLocalTier

if TYPE_CHECKING:
    from ...text.templates.reasoning import ReasoningStyle
    from ...text.tool_formats import ToolFormat

T = TypeVar("T")


class UnloadingLocalTier:
    """`LocalTier` that unloads the model of `tier` after `idle_s` idle seconds (None: only when `sleep()` is called).
    The next request calls `load`, and raises its errors. After a failure, loading is retried only after a pause."""

    def __init__(
        self, tier: LocalTier, load: Callable[[], LocalTier], idle_s: float | None, backoff: LoadBackoff | None = None
    ) -> None:
        self._tier: LocalTier | None = tier
        self._load = load
        self._idle_s = idle_s
        self._backoff = backoff or LoadBackoff()
        self._lock = asyncio.Lock()  # held while the model is loaded or unloaded
        self._runs = 0
        self._timer: asyncio.TimerHandle | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._closed = False
        self.pinned = idle_s is None
        self.model_id = tier.model_id
        self.hidden_size = tier.hidden_size if isinstance(tier, EngineLocalTier) else None
        self.context_length = tier.context_length
        self.tool_format: ToolFormat | None = tier.tool_format
        self.reasoning: ReasoningStyle | None = tier.reasoning
        self._wait()

    @property
    def loaded(self) -> bool:
        return self._tier is not None

    async def start(
        self, messages: Sequence[Message], params: SamplingParams, **options: Unpack[AnswerOptions]
    ) -> IdleGeneration:
        return await self._run(lambda tier: tier.start(messages, params, **options))

    async def start_text(
        self, prompt: Prompt, params: SamplingParams, *, constraint: Constraint | None = None
    ) -> IdleGeneration:
        return await self._run(lambda tier: tier.start_text(prompt, params, constraint=constraint))

    async def with_encoder(self, work: Callable[[TextEncoder], T]) -> T:
        self._runs += 1
        try:
            return await (await self._loaded()).with_encoder(work)
        finally:
            self._done()

    def token_bytes(self, token_id: int, *, skip_special: bool = False) -> bytes:
        """Return the bytes of a vocabulary entry. Call this during or right after a run, while the model is loaded."""
        if self._tier is None:
            raise OverloadedError("The local model was unloaded. Try again.")
        return self._tier.token_bytes(token_id, skip_special=skip_special)

    def pin(self, pinned: bool) -> None:
        """Set whether the model stays loaded while idle. Unpinning raises ConfigurationError if no idle time is set."""
        if not pinned and self._idle_s is None:
            raise ConfigurationError("The model cannot be unpinned. Set local_idle_s first.", param="local_idle_s")
        self.pinned = pinned
        if not self._runs:
            self._wait()

    async def sleep(self) -> None:
        """Unload the model now; the next request reloads it. Raises OverloadedError while a request is running."""
        if self._runs:
            raise OverloadedError("The local model is answering a request. Try again afterwards.")
        await self._unload()

    async def aclose(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        async with self._lock:
            tier, self._tier = self._tier, None
            if tier is not None:
                await tier.aclose()

    async def _run(self, start: Callable[[LocalTier], Awaitable[LocalGeneration]]) -> IdleGeneration:
        self._runs += 1
        try:
            run = await start(await self._loaded())
        except BaseException:
            self._done()
            raise
        return IdleGeneration(run, self._done)

    async def _loaded(self) -> LocalTier:
        async with self._lock:
            if self._closed:
                raise OverloadedError("The router is closed.")
            if self._tier is None:
                if (error := self._backoff.error) is not None:
                    raise error
                try:
                    self._tier = await asyncio.to_thread(self._load)
                except UpdraftError as error:
                    self._backoff.begin(error)
                    raise
            return self._tier

    def _done(self) -> None:
        self._runs -= 1
        if not self._runs:
            self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._idle_s is not None and not self.pinned:
            self._timer = asyncio.get_running_loop().call_later(self._idle_s, self._begin_unloading)

    def _begin_unloading(self) -> None:
        self._unloading = asyncio.create_task(self._unload())

    async def _unload(self) -> None:
        async with self._lock:
            if self._runs or self._tier is None:
                return
            tier, self._tier = self._tier, None
            await tier.aclose()


class IdleGeneration(AsyncIterator[Token]):
    """`LocalGeneration` that calls `done` once it is closed."""

    def __init__(self, run: LocalGeneration, done: Callable[[], None]) -> None:
        self.answer: LocalAnswer = run.answer
        self._run = run
        self._done = done
        self._ended = False

    async def __anext__(self) -> Token:
        return await anext(self._run)

    async def aclose(self) -> None:
        """Stop the run. Idempotent."""
        try:
            await self._run.aclose()
        finally:
            if not self._ended:
                self._ended = True
                self._done()
