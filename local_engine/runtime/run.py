"""Reader side of one answer: an iterator of tokens, for threads and for event loops."""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncIterator, Iterator

from ...protocol.errors import EngineError, UpdraftError
from ...protocol.responses import StopReason
from ...protocol.sampling import SamplingDefaults
from ..sampling.signals import Floats, TokenSignals
from .generation import Event, FinishReason, Generation, LocalToken, PromptScore
from .loop import LocalEngineLoop


class Resources:
    """Keeps the engine's thread alive until `close`, until engine and runs are garbage-collected, or until exit."""

    def __init__(self, loop: LocalEngineLoop) -> None:
        self.loop = loop
        self.close = weakref.finalize(self, loop.close)


class LocalRun(Iterator[LocalToken], AsyncIterator[LocalToken]):
    """The token iterator that `LocalEngine.start` returns, for `for` or `async for`. The token texts join to `text`.

    The engine generates ahead of the reader, up to the end of the answer; the fields describe the tokens read so far.
    `signals` has one entry per token of `token_ids`, and one more for the end-of-turn token if the model ended the
    answer. The end-of-turn token is not in `token_ids`, and is yielded only if held-back text must be sent with it.
    `finish_reason`: "stop" (end of turn or a stop string), "length", or None while running and after a cancel.
    `stop_reason`: for "length", the cause, or None for the request's `max_tokens`; for "stop", the matched stop string.
    `sampling`: the sampling settings in effect. `reasoning`: style of the reasoning in `text`, if any.
    `answer_hidden`: hidden state (hidden,) float32, after the final norm, that produced the last token (or the end of
    turn); None before the end. `prompt_scores`: scores of all prompt tokens but the first, if requested; available from
    the first token on. Only one thread or coroutine may read at a time.
    """

    def __init__(self, resources: Resources, generation: Generation) -> None:
        """Private: call `LocalEngine.start` instead."""
        self.prompt_tokens = len(generation.sequence.tokens)
        self.token_ids: list[int] = []
        self.signals: list[TokenSignals] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: StopReason | None = None
        self.sampling: SamplingDefaults = generation.sampling
        self.reasoning = generation.reasoning
        self.answer_hidden: Floats | None = None
        self.prompt_scores: list[PromptScore] | None = None
        self._resources = resources
        self._generation = generation
        self._parts: list[str] = []
        self._prompt_hidden: Floats | None = None
        self._prompt_logprobs: Floats | None = None
        self._reading = threading.Lock()
        self._done = False

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._parts)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens from the prefix cache; known from the first token on."""
        return self._generation.sequence.cached or 0

    @property
    def prompt_hidden(self) -> Floats:
        """Hidden state (hidden,) float32 of the last prompt token after the final norm. First read a token."""
        self._require_a_token()
        assert self._prompt_hidden is not None
        return self._prompt_hidden

    @property
    def prompt_logprobs(self) -> Floats | None:
        """Log-probabilities (prompt_tokens - 1,) float32 of all prompt tokens but the first.

        Available from the first token on; None if not computed: see `LocalOptions.prompt_logprobs`.
        """
        self._require_a_token()
        return self._prompt_logprobs

    def __iter__(self) -> LocalRun:
        return self

    def __next__(self) -> LocalToken:
        if not self._done:
            self._resources.loop.refuse_fork()  # before the lock, because a fork may have copied it while locked
        with self._reading:
            token = None if self._done else self._read(self._generation.mailbox.get())
        if token is None:
            raise StopIteration
        return token

    def __aiter__(self) -> LocalRun:
        return self

    async def __anext__(self) -> LocalToken:
        if not self._done:
            self._resources.loop.refuse_fork()
        token = None if self._done else self._read(await self._generation.mailbox.get_async())
        if token is None:
            raise StopAsyncIteration
        return token

    def cancel(self) -> None:
        """End the run, from any thread. No more tokens are read, and the engine stops the run before its next step."""
        self._done = True
        self._generation.mailbox.put(None)  # wakes a waiting reader
        self._resources.loop.cancel(self._generation)

    def close(self) -> None:
        """Call `cancel`; for `contextlib.closing`."""
        self.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_done"):  # not set if __init__ failed
            self._resources.loop.cancel(self._generation)

    def _read(self, event: Event | UpdraftError | None) -> LocalToken | None:
        """Record an event; return None if the event has no token to yield."""
        if event is None or self._done:
            return None
        if isinstance(event, UpdraftError):
            self._done = True
            raise event
        if event.is_first:
            self._prompt_hidden, self._prompt_logprobs = event.hidden, event.prompt_logprobs
            self.prompt_scores = event.prompt_scores
        token = event.token
        self.signals.append(token.signals)
        self._parts.append(token.text)
        if not event.is_end:
            self.token_ids.append(token.id)
        if event.finish_reason is not None:
            self._done = True
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
            self.answer_hidden = event.hidden
        return token if token.text or not event.is_end else None

    def _require_a_token(self) -> None:
        if not self.signals:
            raise EngineError("Prompt signals are not available before the first token: read a token first.")
