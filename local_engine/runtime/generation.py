"""Engine side of one answer: chooses tokens from logits, turns them into text, and sends the text to a `LocalRun`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from ...protocol.errors import EngineError, UpdraftError
from ...protocol.responses import StopReason
from ...protocol.sampling import ResolvedParams
from ...text.detokenize import IncrementalDetokenizer
from ...text.repetition import repeats
from ...text.templates.reasoning import ReasoningStyle
from ...text.tool_stream import AnswerEnd
from ..sampling.row_sampler import RowSampler
from ..sampling.signals import Floats, RowMeasure, TokenSignals, log_softmax, token_logprobs
from ..sampling.truncation import largest
from .mailbox import Mailbox
from .scheduler import Sequence

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class LocalToken:
    """One generated token, its text and its signals."""

    id: int
    # Text to append to the answer; empty while a character or a possible stop string is incomplete.
    text: str
    signals: TokenSignals
    # The most likely ids with their log-probabilities, if requested.
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScore:
    """Log-probability and rank of one prompt token, given the tokens before it."""

    id: int
    logprob: float
    # Rank among all tokens by probability; 1 for the most likely token.
    rank: int
    # The most likely ids at this position with their log-probabilities; the request sets their number.
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Event:
    """One token, as sent to the reader of the answer."""

    token: LocalToken
    # Whether this is the end-of-turn token, which is not part of the answer.
    is_end: bool
    is_first: bool
    finish_reason: FinishReason | None
    # For "length", why the answer was cut off, or None for the request's `max_tokens`; for "stop", the stop string.
    stop_reason: StopReason | None = None
    # Hidden state (hidden,) float32 that produced `token`; set for the first and the last token of an answer.
    hidden: Floats | None = None
    # Log-probabilities of the prompt, (prompt_tokens - 1,) float32; sent with the first token, if requested.
    prompt_logprobs: Floats | None = None
    # Scores of the prompt's tokens, with alternatives; sent with the first token, if requested.
    prompt_scores: list[PromptScore] | None = None

    @property
    def is_complete(self) -> bool:
        return self.hidden is not None or not (self.is_first or self.finish_reason)


class EngineJob(Protocol):
    """A job for the engine's loop. All methods run on the loop's thread."""

    sequence: Sequence

    def prompt_rows(self, start: int, logits: Floats) -> None:
        """Process logits (n, vocab); row i predicts the token after `start + i`. Called again after a preemption."""
        ...

    def choose(self, row: RowMeasure, hidden: Floats | None, /) -> None:
        """Choose the next token from the last token's logits. `hidden`: hidden state (hidden,), if available."""
        ...

    def take_hidden_state(self, hidden: Floats, /) -> None:
        """Receive the hidden state (hidden,) of the first position in `sequence.pending_hidden`."""
        ...

    def fail(self, error: UpdraftError) -> None: ...


@dataclass(frozen=True, slots=True)
class LocalGenerationRequest:
    """A prompt and the parameters of its answer."""

    prompt: list[int]
    params: ResolvedParams
    # Maximum number of tokens to generate.
    limit: int
    # Token ids that end the answer.
    end_ids: frozenset[int]
    # Sampler with the state of this answer.
    sampler: RowSampler
    # Whether to end an answer that repeats itself.
    detects_repetition: bool = False
    # Whether to compute log-probabilities of the prompt's tokens.
    score_prompt: bool = False
    # Spelling of the control tokens of tool calls and reasoning, by id. Such tokens are part of the answer's text.
    marks: Mapping[int, str] = field(default_factory=dict[int, str])
    # Style of the reasoning before the answer, if any.
    reasoning: ReasoningStyle | None = None
    # Search for a stop string, for the end of the only allowed tool call, or for a repeated call.
    end: AnswerEnd = field(default_factory=AnswerEnd)


class Generation:
    """The `EngineJob` that writes one answer."""

    def __init__(self, request: LocalGenerationRequest, token_bytes: Callable[[int], bytes]) -> None:
        prompt, params = request.prompt, request.params
        scored = len(prompt) - 1 if request.score_prompt else 0
        self.sequence = Sequence(list(prompt), limit=len(prompt) + request.limit, scored=scored)
        self.mailbox: Mailbox[Event | UpdraftError | None] = Mailbox()
        self.sampling = params.stated
        self.reasoning = request.reasoning
        self._request = request
        self._answer: list[int] = []
        marks = {token: text.encode() for token, text in request.marks.items()}
        self._detokenizer = IncrementalDetokenizer(lambda token: marks[token] if token in marks else token_bytes(token))
        self._end = request.end
        self._scores = np.zeros(scored, np.float32) if request.score_prompt else None
        self._prompt_scores: list[PromptScore] | None = None if params.prompt_logprobs is None else []
        self._held: deque[Event] = deque()  # unsent events; all wait for the hidden state of the first event
        self._begun = False

    def prompt_rows(self, start: int, logits: Floats) -> None:
        if self._scores is not None and not self._begun:
            following = np.asarray(self._request.prompt[start + 1 : start + 1 + len(logits)], np.intp)
            scores = token_logprobs(logits[: len(following)], following)
            self._scores[start : start + len(following)] = scores
            if self._prompt_scores is not None:  # the same entries are written again after a preemption
                count = self._request.params.prompt_logprobs or 0
                entries = [
                    _score(*row, count) for row in zip(logits, following.tolist(), scores.tolist(), strict=False)
                ]
                self._prompt_scores[start : start + len(following)] = entries

    def choose(self, row: RowMeasure, hidden: Floats | None) -> None:
        if self.sequence.finished:
            return  # the answer has ended; its tokens were computed again only for a hidden state
        token = self._request.sampler.choose(row.logits, self._answer, row.token)
        event = self._advance(token, row)
        if event.is_first:
            self._begun, self.sequence.scored = True, 0
            event.prompt_logprobs, event.prompt_scores = self._scores, self._prompt_scores
        if event.finish_reason is None:
            self.sequence.tokens.append(token)
        self.sequence.finished = event.finish_reason is not None
        if event.is_first or event.finish_reason:
            event.hidden = hidden
            if hidden is None:
                self.sequence.pending_hidden.append(self.sequence.computed - 1)
        self._held.append(event)
        self._send()

    def take_hidden_state(self, hidden: Floats) -> None:
        self.sequence.pending_hidden.pop(0)
        next(event for event in self._held if not event.is_complete).hidden = hidden
        self._send()

    def fail(self, error: UpdraftError) -> None:
        self.mailbox.put(error)

    def _advance(self, token: int, row: RowMeasure) -> Event:
        is_first, signals = not self._begun, row.signals(token)
        if token in self._request.end_ids:
            text, _ = self._emit(self._detokenizer.flush(), last=True)
            return Event(LocalToken(token, text, signals), True, is_first, "stop", self._end.stop)
        self._answer.append(token)
        complete, cut = self._request.sampler.complete, self._cut()
        last = complete or cut is not None
        text = self._detokenizer.push(token) + (self._detokenizer.flush() if last else "")
        text, stopped = self._emit(text, last=last)
        top = row.top(self._request.params.logprobs or 0)
        if stopped or complete:
            return Event(LocalToken(token, text, signals, top), False, is_first, "stop", self._end.stop)
        reason = None if cut is None else "length"
        return Event(LocalToken(token, text, signals, top), False, is_first, reason, cut or None)

    def _cut(self) -> StopReason | None:
        """Return why the answer is cut off: "" for the request's `max_tokens`, None if the answer continues."""
        request, written = self._request, len(self._answer)
        if written == request.limit:
            return "" if request.params.max_tokens == written else "default_max_tokens"
        may_end = request.detects_repetition and written >= request.params.min_tokens
        return "repetition_detected" if may_end and repeats(self._answer, written) else None

    def _emit(self, text: str, *, last: bool) -> tuple[str, bool]:
        """Return the text to send now, and whether a stop string or the tool-call limit ended the answer."""
        too_early = len(self._answer) <= self._request.params.min_tokens
        safe, ended = self._end.push(text, too_early=too_early)
        if last and not ended:
            rest, ended = self._end.flush()
            safe += rest
        return safe, ended

    def _send(self) -> None:
        while self._held and self._held[0].is_complete:
            self.mailbox.put(self._held.popleft())


def _score(row: Floats, token: int, logprob: float, count: int) -> PromptScore:
    log_total = float(row[token]) - logprob
    top = tuple((int(other), float(row[other]) - log_total) for other in largest(row, count))
    return PromptScore(token, logprob, int(np.count_nonzero(row > row[token])) + 1, top)


@dataclass(slots=True)
class Scoring:
    """The `EngineJob` of `LocalEngine.score`: computes the distribution after every token of a text."""

    sequence: Sequence
    rows: Floats
    result: Future[Floats] = field(default_factory=Future[Floats])

    @staticmethod
    def of(tokens: list[int], vocab_size: int) -> Scoring:
        sequence = Sequence(tokens, limit=len(tokens), scored=len(tokens))
        return Scoring(sequence, np.empty((len(tokens), vocab_size), np.float32))

    def prompt_rows(self, start: int, logits: Floats) -> None:
        self.rows[start : start + len(logits)] = log_softmax(logits)

    def choose(self, _row: RowMeasure, _hidden: Floats | None) -> None:
        self.sequence.finished = True
        self.result.set_result(self.rows)

    def take_hidden_state(self, _hidden: Floats) -> None:
        raise EngineError("A scoring job received a hidden state that it did not request.")

    def fail(self, error: UpdraftError) -> None:
        self.result.set_exception(error)
