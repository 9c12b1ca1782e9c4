"""One answer being written: each `next()` is one decode step and yields one token."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..protocol.errors import EngineError
from ..protocol.sampling import SamplingParams, logit_edits
from ..text.detokenize import IncrementalDetokenizer, StopMatcher
from .cache import CachedContext
from .llama import Floats, LlamaModel
from .sampler import Distribution, Sampler, TokenSignals
from .turns import Turns


@dataclass(frozen=True, slots=True)
class LocalToken:
    """One generated token. `text` is what it adds to the answer: empty while a character or a possible stop string is
    incomplete. `top`: the most likely ids with their log-probabilities, where asked for."""

    id: int
    text: str
    signals: TokenSignals
    top: tuple[tuple[int, float], ...] = ()


class Resources:
    """What the runs of one engine share. Freed by `close`, else when engine and runs are garbage, at latest at exit."""

    def __init__(self, model: LlamaModel, context: CachedContext, turns: Turns) -> None:
        self.model = model
        self.context = context
        self.turns = turns
        self._free = weakref.finalize(self, _free, model, context, turns)

    def close(self) -> None:
        """Free everything once no step is running; later steps raise EngineError. Harmless if repeated."""
        self._free()


def _free(model: LlamaModel, context: CachedContext, turns: Turns) -> None:
    turns.close()
    context.close()
    model.close()


@dataclass(slots=True)
class _State:
    """The logits (vocab,) and hidden state (hidden,) after the last evaluated token, float32."""

    logits: Floats
    hidden: Floats


@dataclass(slots=True)
class _Prompt:
    hidden: Floats
    logprobs: Floats


class LocalRun(Iterator[LocalToken]):
    """The iterator `LocalEngine.start` returns. The texts of its tokens join to `text`.

    `signals` has one entry per token of `token_ids`, and one more for the end-of-turn token if the model chose to end.
    That token is not in `token_ids`, and it is yielded only where held-back text has to go out with it.
    `finish_reason`: "stop" (end of turn or a stop string), "length", or None while running and after a cancel.
    """

    def __init__(
        self,
        resources: Resources,
        prompt: list[int],
        params: SamplingParams,
        *,
        limit: int,
        default_temperature: float,
    ) -> None:
        """Use `LocalEngine.start`. `limit`: tokens to generate at most."""
        self.prompt_tokens = len(prompt)
        self.token_ids: list[int] = []
        self.signals: list[TokenSignals] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self._resources = resources
        self._params = params
        self._limit = limit
        self._prompt_ids = prompt
        self._sampler = Sampler(params, default_temperature)
        self._end_ids = params.end_ids(resources.model.end_ids)
        self._detokenizer = IncrementalDetokenizer(resources.model.token_bytes)
        self._matcher = StopMatcher(params.stop)
        self._parts: list[str] = []
        self._prompt: _Prompt | None = None
        self._state: _State | None = None
        self._stepping = threading.Lock()
        self._cancelled = threading.Event()
        self._done = False
        self._ticket = object()  # stands for this run in `Turns`, without keeping it alive

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._parts)

    @property
    def prompt_hidden(self) -> Floats:
        """Hidden state (hidden,) float32 after the final norm, at the last prompt token. From the first token on."""
        return self._known_prompt().hidden

    @property
    def prompt_logprobs(self) -> Floats:
        """Log-probability (prompt_tokens - 1,) float32 of each prompt token but the first. From the first token on."""
        return self._known_prompt().logprobs

    @property
    def answer_hidden(self) -> Floats | None:
        """Hidden state (hidden,) float32 from which the last token (or the end of turn) was chosen; None before."""
        return None if self._state is None else self._state.hidden

    def __iter__(self) -> LocalRun:
        return self

    def __next__(self) -> LocalToken:
        with self._stepping:
            if self._done:
                raise StopIteration
            try:
                token = self._step()
            except BaseException:
                self._finish(None)
                raise
        if token is None:
            raise StopIteration
        return token

    def cancel(self) -> None:
        """End the run at its next step, from any thread; a step that is running completes."""
        self._cancelled.set()

    def close(self) -> None:
        """Cancel and give the context back."""
        self.cancel()
        self._resources.turns.leave(self._ticket)

    def __del__(self) -> None:
        if hasattr(self, "_ticket"):  # not set if __init__ failed
            self.close()

    def _step(self) -> LocalToken | None:
        state = self._advance()
        if state is None:
            return self._finish(None)
        self._state = state
        edits = logit_edits(self._params, self._prompt_ids, self.token_ids, self._end_ids)
        chosen = self._sampler.choose(state.logits, edits)
        distribution = Distribution(state.logits)
        signals = distribution.signals(chosen)
        self.signals.append(signals)
        if chosen in self._end_ids:
            text = self._emit(self._detokenizer.flush(), last=True)
            self._finish("stop")
            return LocalToken(chosen, text, signals) if text else None
        self.token_ids.append(chosen)
        at_limit = len(self.token_ids) == self._limit
        raw = self._detokenizer.push(chosen) + (self._detokenizer.flush() if at_limit else "")
        text = self._emit(raw, last=at_limit)
        if at_limit and not self._done:
            self._finish("length")
        return LocalToken(chosen, text, signals, distribution.top(self._params.logprobs or 0))

    def _advance(self) -> _State | None:
        """Evaluate what is not evaluated yet; None if the run was cancelled first."""
        context, turns = self._resources.context, self._resources.turns
        with turns.step(self._ticket, self._cancelled) as granted:
            if not granted:
                return None
            tokens = self._prompt_ids + self.token_ids
            if self._state is not None and context.holds(tokens[:-1]):
                return _State(*context.append(tokens[-1]))
            prefill = context.prefill(tokens, self._cancelled.is_set)
        if prefill is None:
            return None
        if self._prompt is None:
            self._prompt = _Prompt(prefill.hidden, prefill.logprobs)
        return _State(prefill.logits, prefill.hidden)

    def _emit(self, text: str, *, last: bool) -> str:
        too_early = len(self.token_ids) < self._params.min_tokens
        safe, stopped = (text, False) if too_early else self._matcher.push(text)
        if stopped:
            self._finish("stop")
        elif last:
            safe += self._matcher.flush()
        self._parts.append(safe)
        return safe

    def _finish(self, reason: Literal["stop", "length"] | None) -> None:
        self._done = True
        self.finish_reason = reason
        self._resources.turns.leave(self._ticket)

    def _known_prompt(self) -> _Prompt:
        if self._prompt is None:
            raise EngineError("What the prompt looks like to the model is known from the first token on.")
        return self._prompt
