"""Local tier over the on-device engine, which serves concurrent requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, Unpack

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


class EngineLocalTier:
    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._grammars: GrammarCheck | None = None
        self.model_id = engine.model_id
        self.context_length = engine.context_length
        self.tool_format: ToolFormat | None = engine.tool_format
        self.reasoning: ReasoningStyle | None = engine.reasoning

    @property
    def hidden_size(self) -> int:
        return self._engine.hidden_size

    async def start(
        self, messages: Sequence[Message], params: SamplingParams, **options: Unpack[AnswerOptions]
    ) -> EngineGeneration:
        if (constraint := options.get("constraint")) is not None:
            await self._check(constraint)
        # Start the run in a thread, since tokenizing a long prompt takes a while. If the caller gives up meanwhile,
        # no reference to the run remains, so garbage collection ends the run.
        run = EngineGeneration(await asyncio.to_thread(self._engine.start, messages, params, **options))
        run.answer.ignores_effort = not self._engine.chat_template.effort_variables(options.get("effort"))
        return run

    async def start_text(
        self, prompt: Prompt, params: SamplingParams, *, constraint: Constraint | None = None
    ) -> EngineGeneration:
        if constraint is not None:
            await self._check(constraint)
        return EngineGeneration(await asyncio.to_thread(self._engine.start_text, prompt, params, constraint=constraint))

    async def with_encoder(self, work: Callable[[TextEncoder], T]) -> T:
        return await asyncio.to_thread(work, self._engine)

    def token_bytes(self, token_id: int, *, skip_special: bool = False) -> bytes:
        return self._engine.token_bytes(token_id, skip_special=skip_special)

    async def _check(self, constraint: Constraint) -> None:
        if self._grammars is None:
            from ...text.grammars.check import GrammarCheck

            self._grammars = GrammarCheck(self._engine.vocabulary)
        await self._grammars.check(constraint)

    async def aclose(self) -> None:
        if self._grammars is not None:
            await self._grammars.close()
        self._engine.close()


class EngineGeneration(AsyncIterator[Token]):
    """`LocalGeneration` of the engine, which decodes ahead while the event loop consumes tokens."""

    def __init__(self, run: LocalRun) -> None:
        self.answer = LocalAnswer(run.prompt_tokens, sampling=run.sampling, reasoning=run.reasoning)
        self._run = run
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
        self._closed = True
        self._run.close()
