"""Local tier over the on-device engine, which serves concurrent requests; its model is unloaded when idle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, Unpack

from ...protocol.errors import ConfigurationError, OverloadedError, UpdraftError
from ...protocol.prompts import Prompt
from ...protocol.requests import Message
from ...protocol.sampling import SamplingParams
from ...protocol.structured import AnswerOptions, Constraint
from ...text.tokenization import TextEncoder
from .interfaces import LocalAnswer, Token

if TYPE_CHECKING:
    from ...local_engine.engine import LocalEngine
    from ...local_engine.runtime.run import LocalRun
    from ...text.grammars.check import GrammarCheck
    from ...text.templates.reasoning import ReasoningStyle
    from ...text.tool_formats import ToolFormat

T = TypeVar("T")
_FIRST_S, _LONGEST_S = 15.0, 900.0


class LoadBackoff:
    """Pause after a failed attempt to load a model, doubled each time. A change of `version()` ends the pause early."""

    def __init__(self, version: Callable[[], object] = lambda: None) -> None:
        self._version = version
        self._failed: object = None  # file version that failed to load
        self._error: UpdraftError | None = None
        self._length_s = _FIRST_S
        self._until = 0.0

    def begin(self, error: UpdraftError) -> None:
        self._error, self._failed = error, self._version()
        self._until = time.monotonic() + self._length_s
        self._length_s = min(2 * self._length_s, _LONGEST_S)

    @property
    def error(self) -> UpdraftError | None:
        """Last failure, or None if loading may be tried again. Its traceback is removed, as each raise extends it."""
        over = self._error is None or time.monotonic() >= self._until or self._version() != self._failed
        return None if over or self._error is None else self._error.with_traceback(None)


class EngineLocalTier:
    """`LocalTier` that unloads the model of `engine` after `idle_s` idle seconds (None: only when `sleep()` is called).
    The next request calls `load`, and raises its errors. After a failure, loading is retried only after a pause."""

    def __init__(
        self,
        engine: LocalEngine,
        load: Callable[[], LocalEngine] | None = None,
        idle_s: float | None = None,
        backoff: LoadBackoff | None = None,
    ) -> None:
        self._engine: LocalEngine | None = engine
        self._grammars: GrammarCheck | None = None
        self._load = load
        self._idle_s = idle_s
        self._backoff = backoff or LoadBackoff()
        self._lock = asyncio.Lock()  # held while the model is loaded or unloaded
        self._runs = 0
        self._timer: asyncio.TimerHandle | None = None
        self._unloading: asyncio.Task[None] | None = None
        self.pinned = idle_s is None
        self.model_id = engine.model_id
        self.hidden_size = engine.hidden_size
        self.context_length = engine.context_length
        self.tool_format: ToolFormat | None = engine.tool_format
        self.reasoning: ReasoningStyle | None = engine.reasoning
        self._wait()

    @property
    def loaded(self) -> bool:
        return self._engine is not None

    async def start(
        self, messages: Sequence[Message], params: SamplingParams, **options: Unpack[AnswerOptions]
    ) -> EngineGeneration:
        def begin(engine: LocalEngine) -> EngineGeneration:
            run = EngineGeneration(engine.start(messages, params, **options), self._done)
            run.answer.ignores_effort = not engine.chat_template.effort_variables(options.get("effort"))
            return run

        return await self._begin(begin, options.get("constraint"))

    async def start_text(
        self, prompt: Prompt, params: SamplingParams, *, constraint: Constraint | None = None
    ) -> EngineGeneration:
        return await self._begin(
            lambda engine: EngineGeneration(engine.start_text(prompt, params, constraint=constraint), self._done),
            constraint,
        )

    async def with_encoder(self, work: Callable[[TextEncoder], T]) -> T:
        self._runs += 1
        try:
            return await asyncio.to_thread(work, await self._loaded())
        finally:
            self._done()

    def token_bytes(self, token_id: int, *, skip_special: bool = False) -> bytes:
        """Return the bytes of a vocabulary entry. Call this during or right after a run, while the model is loaded."""
        if self._engine is None:
            raise OverloadedError("The local model was unloaded. Try again.")
        return self._engine.token_bytes(token_id, skip_special=skip_special)

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
        await self._unload_idle()

    async def aclose(self) -> None:
        self._load = None
        if self._timer is not None:
            self._timer.cancel()
        async with self._lock:
            await self._unload()

    async def _begin(
        self, begin: Callable[[LocalEngine], EngineGeneration], constraint: Constraint | None
    ) -> EngineGeneration:
        """Start a run in a thread, since tokenizing a long prompt takes a while. If the caller gives up meanwhile, no
        reference to the run remains, so garbage collection ends the run."""
        self._runs += 1
        try:
            engine = await self._loaded()
            if constraint is not None:
                await self._check(engine, constraint)
            return await asyncio.to_thread(begin, engine)
        except BaseException:
            self._done()
            raise

    async def _check(self, engine: LocalEngine, constraint: Constraint) -> None:
        if self._grammars is None:
            from ...text.grammars.check import GrammarCheck

            self._grammars = GrammarCheck(engine.vocabulary)
        await self._grammars.check(constraint)

    async def _loaded(self) -> LocalEngine:
        async with self._lock:
            if self._engine is None:
                if self._load is None:
                    raise OverloadedError("The router is closed.")
                if (error := self._backoff.error) is not None:
                    raise error
                try:
                    self._engine = await asyncio.to_thread(self._load)
                except UpdraftError as error:
                    self._backoff.begin(error)
                    raise
            return self._engine

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
        self._unloading = asyncio.create_task(self._unload_idle())

    async def _unload_idle(self) -> None:
        async with self._lock:
            if not self._runs:
                await self._unload()

    async def _unload(self) -> None:
        grammars, self._grammars = self._grammars, None
        engine, self._engine = self._engine, None
        if grammars is not None:
            await grammars.close()
        if engine is not None:
            engine.close()


class EngineGeneration(AsyncIterator[Token]):
    """`LocalGeneration` of the engine, which decodes ahead while the event loop consumes tokens. Calls `done` once it
    is closed."""

    def __init__(self, run: LocalRun, done: Callable[[], None]) -> None:
        self.answer = LocalAnswer(run.prompt_tokens, sampling=run.sampling, reasoning=run.reasoning)
        self._run = run
        self._done = done
        self._closed = False

    async def __anext__(self) -> Token:
        if self._closed:
            raise StopAsyncIteration
        run, answer = self._run, self.answer
        try:
            token: Token = await anext(run)
        except StopAsyncIteration:
            if run.finish_reason is not None:  # take over the engine's final values
                answer.signals, answer.text = list(run.signals), run.text
                answer.finish_reason, answer.stop_reason = run.finish_reason, run.stop_reason
                answer.answer_hidden = run.answer_hidden
                answer.prompt_scores = run.prompt_scores or ()
            raise
        if not answer.tokens:
            answer.cached_tokens = run.cached_tokens
            answer.prompt_hidden, answer.prompt_logprobs = run.prompt_hidden, run.prompt_logprobs
            answer.prompt_scores = run.prompt_scores or ()
        answer.tokens.append(token)
        answer.signals.append(token.signals)
        answer.text += token.text
        return token

    async def aclose(self) -> None:
        """Stop decoding after the current step. Idempotent."""
        if not self._closed:
            self._closed = True
            self._done()
        self._run.close()
