"""Streams an answer's text from the engine's tokens: whole characters, without stop strings, usage at the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import UNSET

from ....protocol.errors import InvalidRequestError
from ....protocol.responses import FinishReason, StopReason, Usage
from ....text.detokenize import IncrementalDetokenizer
from ....text.tokenizer import Tokenizer
from ....text.tool_stream import AnswerEnd, AnswerSyntax
from ...engine.types.prediction import ALIGN_ON, PredictionCursor

if TYPE_CHECKING:
    from ...engine.process.client import EngineClient
    from ...engine.types.outputs import PromptLogprob, RequestStats, TokenLogprob, TokenOutput
    from ...engine.types.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token and its log-probabilities. `offset` is the index of the token's first character in the answer."""

    token_id: int
    score: TokenLogprob
    offset: int


@dataclass(slots=True)
class Piece:
    """New text of answer number `index` to prompt number `prompt` of a request, from one engine step."""

    text: str = ""
    # Log-probabilities of tokens whose text has been sent by now. `usage` counts this answer alone and is set together
    # with `finish_reason`. `prompt_scores`, if requested, are in the first piece of a prompt's first answer.
    scores: list[ScoredToken] = field(default_factory=list[ScoredToken])
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | None = None
    usage: Usage | None = None
    index: int = 0
    prompt_scores: list[PromptLogprob] = field(default_factory=list["PromptLogprob"])
    prompt: int = 0
    # Tokens of this answer so far, including tokens whose text has not been sent yet.
    num_tokens: int = 0
    # Prompt tokens from the prefix cache.
    cached_tokens: int = 0
    # Token ids generated since the last piece, if requested. With all ids so far, another node can resume the answer.
    token_ids: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """Token ids that a client sends and requests, to resume broken streams."""

    # Whether each piece includes its token ids.
    reported: bool = False
    # Tokens of each answer that an earlier node has generated. They are appended to the prompt. Their text has been
    # sent already, except for an incomplete character or stop string at the end.
    given: Sequence[int] = ()


async def pieces(
    engine: EngineClient,
    tokenizer: Tokenizer,
    request: GenerationRequest,
    syntax: AnswerSyntax | None = None,
    tokens: TokenExchange | None = None,
) -> AsyncGenerator[Piece]:
    """Yield the answers to `request` piece by piece. Closing the iterator stops the engine's work on the answers.

    If `syntax` allows only one tool call and no constraint enforces that, an answer ends after its first call. Raises
    InvalidRequestError if the grammar of a constraint fails.
    """
    tokens, syntax = tokens or TokenExchange(), syntax or AnswerSyntax()
    shown = {token_id: text.encode() for token_id, text in syntax.marks(tokenizer).items()}

    def token_bytes(token_id: int) -> bytes:
        return shown[token_id] if token_id in shown else tokenizer.token_bytes(token_id)

    def opened() -> _Answer:
        end = syntax.end(request.params, request.constraint)
        detokenizer = IncrementalDetokenizer(token_bytes)
        end.push(detokenizer.push(*tokens.given), too_early=True)  # no stop string ended these tokens
        return _Answer(request, detokenizer, end)

    open_answers = {index: opened() for index in range(request.n)}
    reports = tokens.reported and syntax.tools is None
    unreported: dict[int, list[int]] = {index: [] for index in range(request.n)}
    async with aclosing(engine.generate(request)) as outputs:
        async for output in outputs:
            if output.index not in open_answers:
                continue  # a stop string or tool call has already ended the answer
            if output.error is not None:
                param = request.constraint and request.constraint.param
                raise InvalidRequestError(f"{param}: {output.error}", param=param, code="grammar_failed")
            answer = open_answers[output.index]
            piece = answer.push(output)
            piece.index, piece.num_tokens, piece.cached_tokens = output.index, answer.num_tokens, answer.cached_tokens
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
                if output.finish_reason is None:  # a stop string or tool call ended the answer, so stop the engine
                    engine.stop_answer(request.request_id, output.index)


def total_usage(pieces: Iterable[Piece]) -> Usage:
    """Return the usage of all answers to a request, counting each prompt once."""
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
    """One unfinished answer. `num_tokens` counts its tokens, up to the token whose text ended the answer."""

    def __init__(self, request: GenerationRequest, detokenizer: IncrementalDetokenizer, end: AnswerEnd) -> None:
        self._request = request
        self._detokenizer = detokenizer
        self._end = end
        self._steps: list[list[int]] = []  # tokens of each engine step
        self.num_tokens = 0
        self._held_scores: list[ScoredToken] = []
        self.cached_tokens = 0
        self._decoded = 0  # number of characters decoded, as in `_emitted`
        self._emitted = 0

    def push(self, output: TokenOutput) -> Piece:
        piece = Piece()
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        if self._read(output, piece):
            return self._finished(piece, "stop", None)
        if output.finish_reason is None:
            self._release_scores(piece)
            return piece
        if self._emit(self._detokenizer.flush(), piece) or self._show(*self._end.flush(), piece):
            return self._finished(piece, "stop", output.stats)
        self._emitted = self._decoded + 1  # also release the scores of tokens without text
        piece.stop_reason = output.stop_reason
        reason = "length" if output.finish_reason == "length" else "stop"  # `pieces` has already raised any error
        return self._finished(piece, reason, output.stats)

    def _read(self, output: TokenOutput, piece: Piece) -> bool:
        """Add the tokens' text to `piece`. Return True if the text ends the answer; later tokens are dropped."""
        if not self._end.searches and not output.logprobs:
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
        """Append text that is safe to send to `piece`. Return True if a stop string or tool call ends the answer."""
        self._decoded += len(text)
        too_early = self.num_tokens <= self._request.params.min_tokens
        return self._show(*self._end.push(text, too_early=too_early), piece)

    def _show(self, text: str, ended: bool, piece: Piece) -> bool:
        piece.text += text
        self._emitted += len(text)
        return ended

    def _release_scores(self, piece: Piece) -> None:
        """Add the scores of tokens whose text has begun to be sent. Scores within a stop string are never sent."""
        piece.scores += [held for held in self._held_scores if held.offset < self._emitted]
        self._held_scores = [held for held in self._held_scores if held.offset >= self._emitted]

    def _finished(self, piece: Piece, reason: FinishReason, stats: RequestStats | None) -> Piece:
        self._release_scores(piece)
        piece.finish_reason = reason
        piece.stop_reason = self._end.stop or piece.stop_reason
        piece.usage = _usage(stats) if stats is not None else self._own_usage()
        return piece

    def _own_usage(self) -> Usage:
        """Count the usage of an answer that a stop string ended, for which the engine reports no statistics."""
        accepted = self._num_accepted()
        return Usage.of(
            len(self._request.prompt_ids),
            self.num_tokens,
            cached=self.cached_tokens,
            accepted=accepted,
            rejected=len(self._request.draft_ids) - accepted,
        )

    def _num_accepted(self) -> int:
        """Return how many tokens of the request's prediction were accepted, counted step by step as in the engine."""
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
