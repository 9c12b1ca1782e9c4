"""From an engine's tokens to an answer's text, piece by piece: whole characters, no stop strings, usage at the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from msgspec import UNSET

from ....protocol.errors import InvalidRequestError, UpdraftError
from ....protocol.responses import FinishReason, StopReason, Usage
from ....text.detokenize import IncrementalDetokenizer, StopMatcher
from ....text.tokenizer import Tokenizer
from ....text.tool_stream import OfferedTools
from ...engine.types.prediction import ALIGN_ON, PredictionCursor

if TYPE_CHECKING:
    from ...engine.stats import EngineStats
    from ...engine.types.outputs import PromptLogprob, RequestStats, TokenLogprob, TokenOutput
    from ...engine.types.request import GenerationRequest


class TokenSource(Protocol):
    """The interface that a node needs of an engine: the part of `EngineClient` that it calls."""

    @property
    def failure(self) -> UpdraftError | None: ...
    async def start(self) -> None: ...
    async def close(self) -> None: ...
    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput]: ...
    def stop_answer(self, request_id: str, index: int) -> None: ...
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """`offset`: of the answer's characters the first that is, at least in part, the token's."""

    token_id: int
    score: TokenLogprob
    offset: int


@dataclass(slots=True)
class Piece:
    """The addition of one engine step to the `index`-th answer to the `prompt`-th of the request's prompts."""

    text: str = ""
    # Of the tokens whose text is out now. `usage` comes with `finish_reason`, of this answer alone.
    # `prompt_scores`, if asked for, come with the first piece of a prompt's first answer.
    scores: list[ScoredToken] = field(default_factory=list[ScoredToken])
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | None = None
    usage: Usage | None = None
    index: int = 0
    prompt_scores: list[PromptLogprob] = field(default_factory=list["PromptLogprob"])
    prompt: int = 0
    # Of this answer so far, also those whose text is still held back.
    num_tokens: int = 0
    # If asked for: the tokens since the last piece. A server that is given all of them goes on behind this one.
    token_ids: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """The tokens of answers that a client gives and gets."""

    # Whether each piece has its tokens.
    reported: bool = False
    # The first tokens of each answer, at the end of its prompt. Their text is out, but for a character or stop string
    # that they only begin.
    given: Sequence[int] = ()


async def pieces(
    engine: TokenSource,
    tokenizer: Tokenizer,
    request: GenerationRequest,
    tools: OfferedTools | None = None,
    tokens: TokenExchange | None = None,
) -> AsyncGenerator[Piece]:
    """The answers to `request`. Closing the iterator aborts the engine's work on them, as does in each a stop string.

    `tools`: those that the answers may call. Where they may make one call, and no constraint holds them to that, an
    answer ends behind its first. Raises InvalidRequestError for a constraint that no answer could keep to.
    """
    tokens = tokens or TokenExchange()
    shown = {} if tools is None else {token_id: text.encode() for token_id, text in tools.format.marks.items()}

    def token_bytes(token_id: int) -> bytes:
        return shown[token_id] if token_id in shown else tokenizer.token_bytes(token_id)

    open_answers = {index: _Answer(token_bytes, request, tools, tokens.given) for index in range(request.n)}
    reports = tokens.reported and tools is None
    unreported: dict[int, list[int]] = {index: [] for index in range(request.n)}
    async with aclosing(engine.generate(request)) as outputs:
        async for output in outputs:
            if output.index not in open_answers:
                continue  # what was said has ended it, and others go on
            if output.error is not None:
                param = request.constraint and request.constraint.param
                raise InvalidRequestError(f"{param}: {output.error}", param=param, code="grammar_failed")
            answer = open_answers[output.index]
            piece = answer.push(output)
            piece.index, piece.num_tokens = output.index, answer.num_tokens
            piece.prompt_scores = list(output.prompt_logprobs)
            if reports:
                unreported[output.index] += output.token_ids
            if piece.text or piece.scores or piece.finish_reason or piece.prompt_scores:
                if not piece.finish_reason:
                    piece.token_ids, unreported[output.index] = unreported[output.index], []
                yield piece
            if piece.finish_reason:
                del open_answers[output.index]
                if not open_answers:
                    return
                if output.finish_reason is None:  # but by what was said, of which the engine knows nothing
                    engine.stop_answer(request.request_id, output.index)


def total_usage(pieces: Iterable[Piece]) -> Usage:
    """Of all the answers to a request: each prompt counts once."""
    ends = [(piece.prompt, piece.usage) for piece in pieces if piece.usage is not None]
    prompts = dict(ends).values()
    total = Usage.of(
        sum(usage.prompt_tokens for usage in prompts),
        sum(usage.completion_tokens for _, usage in ends),
        cached=sum(usage.prompt_tokens_details.cached_tokens for usage in prompts),
    )
    details = total.completion_tokens_details
    for name in details.__struct_fields__:
        counts = [getattr(usage.completion_tokens_details, name) for _, usage in ends]
        known = [count for count in counts if count is not UNSET]
        setattr(details, name, sum(known) if known else UNSET)
    return total


class _Answer:
    """`num_tokens`: those that came, up to one whose text ended the answer."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        request: GenerationRequest,
        tools: OfferedTools | None,
        given: Sequence[int],
    ) -> None:
        self._request = request
        self._detokenizer = IncrementalDetokenizer(token_bytes)
        self._stop = StopMatcher(request.params.stop)
        if self._stop.push(self._detokenizer.push(*given))[1]:  # within `min_tokens`, where none counted
            self._stop = StopMatcher(request.params.stop)
        self._call_limit = tools and tools.call_limit(
            request.constraint, detects_repetition=request.params.detects_repetition
        )
        self._only_engine_ends = not request.params.stop and self._call_limit is None
        self._steps: list[list[int]] = []  # the tokens of each
        self.num_tokens = 0
        self._held_scores: list[ScoredToken] = []
        self._cached_tokens = 0
        self._decoded = 0  # characters
        self._emitted = 0

    def push(self, output: TokenOutput) -> Piece:
        piece = Piece()
        if output.cached_tokens is not None:
            self._cached_tokens = output.cached_tokens
        if self._read(output, piece):
            return self._finished(piece, "stop", None)
        if output.finish_reason is None:
            self._release_scores(piece)
            return piece
        if self._emit(self._detokenizer.flush(), piece) or self._show(self._stop.flush(), piece):
            return self._finished(piece, "stop", output.stats)
        self._emitted = self._decoded + 1  # all is out, also tokens without any text
        piece.stop_reason = output.stop_reason
        reason = "length" if output.finish_reason == "length" else "stop"  # an error has been raised before
        return self._finished(piece, reason, output.stats)

    def _read(self, output: TokenOutput, piece: Piece) -> bool:
        """Add the tokens' text to `piece`. True: the answer ends with it, and any other tokens are no part of that."""
        if self._only_engine_ends and not output.logprobs:
            self.num_tokens += len(output.token_ids)
            return self._emit(self._detokenizer.push(*output.token_ids), piece)
        self._steps.append([])
        for index, token_id in enumerate(output.token_ids):
            if output.logprobs:
                self._held_scores.append(ScoredToken(token_id, output.logprobs[index], self._decoded))
            self._steps[-1].append(token_id)
            self.num_tokens += 1
            if self._emit(self._detokenizer.push(token_id), piece):
                return True
        return False

    def _emit(self, text: str, piece: Piece) -> bool:
        """Add to `piece` what is safe to show. True: the answer ends with it."""
        self._decoded += len(text)
        too_early = self.num_tokens < self._request.params.min_tokens
        safe, stopped = (text, False) if too_early else self._stop.push(text)
        return self._show(safe, piece) or stopped

    def _show(self, text: str, piece: Piece) -> bool:
        """Add `text` to `piece`, up to the end of a call that must be the only one. True: there is one."""
        text, called = (text, False) if self._call_limit is None else self._call_limit.push(text)
        piece.text += text
        self._emitted += len(text)
        return called

    def _release_scores(self, piece: Piece) -> None:
        """A token's score goes out with the first of its text; those within a stop string never do."""
        piece.scores += [held for held in self._held_scores if held.offset < self._emitted]
        self._held_scores = [held for held in self._held_scores if held.offset >= self._emitted]

    def _finished(self, piece: Piece, reason: FinishReason, stats: RequestStats | None) -> Piece:
        self._release_scores(piece)
        piece.finish_reason = reason
        piece.stop_reason = self._stop.matched or piece.stop_reason
        piece.usage = _usage(stats) if stats is not None else self._own_usage()
        return piece

    def _own_usage(self) -> Usage:
        """For an answer that its own text ended: the engine did not, so it has not counted."""
        accepted = self._num_accepted()
        return Usage.of(
            len(self._request.prompt_ids),
            self.num_tokens,
            cached=self._cached_tokens,
            accepted=accepted,
            rejected=len(self._request.draft_ids) - accepted,
        )

    def _num_accepted(self) -> int:
        """Tokens of the prediction that the model confirmed, found as the engine finds them: step by step."""
        cursor, known = PredictionCursor(self._request.draft_ids), self._request.prompt_ids
        for new in self._steps:
            known = known[-ALIGN_ON:] + new
            cursor.advance(known, len(new), 0)
        return cursor.num_accepted


def _usage(stats: RequestStats) -> Usage:
    usage = Usage.of(
        stats.prompt_tokens,
        stats.completion_tokens,
        cached=stats.cached_tokens,
        accepted=stats.accepted_prediction_tokens,
        rejected=stats.rejected_prediction_tokens,
    )
    if stats.draft_proposed:
        usage.completion_tokens_details.draft_proposed = stats.draft_proposed
        usage.completion_tokens_details.draft_accepted = stats.draft_accepted
    return usage
