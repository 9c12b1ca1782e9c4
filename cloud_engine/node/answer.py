"""From an engine's tokens to an answer's text, piece by piece: whole characters, no stop strings, usage at the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from msgspec import UNSET

from ...protocol.errors import InvalidRequestError, UpdraftError
from ...protocol.responses import FinishReason, Usage
from ...text.detokenize import IncrementalDetokenizer, StopMatcher
from ...text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..engine.request import GenerationRequest, PromptLogprob, RequestStats, TokenLogprob, TokenOutput
    from ..engine.stats import EngineStats


class TokenSource(Protocol):
    """What a node needs of an engine: the face of `EngineClient`."""

    @property
    def failure(self) -> UpdraftError | None: ...
    async def start(self) -> None: ...
    async def close(self) -> None: ...
    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput]: ...
    def stop_answer(self, request_id: str, index: int) -> None: ...
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class ScoredToken:
    token_id: int
    score: TokenLogprob


@dataclass(slots=True)
class Piece:
    """What one engine step added to one of the answers, the `index`-th, to the `prompt`-th of the request's prompts.

    `scores`: of the tokens whose text is out now. `usage` comes with `finish_reason`, of this answer alone.
    `prompt_scores`, if asked for, come with the first piece of a prompt's first answer.
    """

    text: str = ""
    scores: list[ScoredToken] = field(default_factory=list[ScoredToken])
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    index: int = 0
    prompt_scores: list[PromptLogprob] = field(default_factory=list["PromptLogprob"])
    prompt: int = 0


async def pieces(
    engine: TokenSource, tokenizer: Tokenizer, request: GenerationRequest, marks: Mapping[int, str] | None = None
) -> AsyncGenerator[Piece]:
    """The answers to `request`. Closing the iterator, or a stop string in each, aborts the engine's work on them.

    `marks`: special tokens that are to be part of the text, as what. Raises InvalidRequestError for a constraint that
    no answer could keep to.
    """
    shown = {token_id: text.encode() for token_id, text in (marks or {}).items()}

    def token_bytes(token_id: int) -> bytes:
        return shown[token_id] if token_id in shown else tokenizer.token_bytes(token_id)

    open_answers = {index: _Answer(token_bytes, request) for index in range(request.n)}
    async with aclosing(engine.generate(request)) as outputs:
        async for output in outputs:
            if output.index not in open_answers:
                continue  # a stop string has ended it, and others go on
            if output.error is not None:
                param = request.constraint and request.constraint.param
                raise InvalidRequestError(f"{param}: {output.error}", param=param, code="grammar_failed")
            piece = open_answers[output.index].push(output)
            piece.index = output.index
            piece.prompt_scores = list(output.prompt_logprobs)
            if piece.text or piece.scores or piece.finish_reason or piece.prompt_scores:
                yield piece
            if piece.finish_reason:
                del open_answers[output.index]
                if not open_answers:
                    return
                if output.finish_reason is None:  # but by a stop string, of which the engine knows nothing
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
    def __init__(self, token_bytes: Callable[[int], bytes], request: GenerationRequest) -> None:
        self._request = request
        self._detokenizer = IncrementalDetokenizer(token_bytes)
        self._stop = StopMatcher(request.params.stop)
        self._token_ids: list[int] = []
        self._held_scores: list[tuple[int, ScoredToken]] = []  # (where the token's text starts, its score)
        self._cached_tokens = 0
        self._decoded = 0  # characters
        self._emitted = 0

    def push(self, output: TokenOutput) -> Piece:
        piece = Piece()
        if output.cached_tokens is not None:
            self._cached_tokens = output.cached_tokens
        for index, token_id in enumerate(output.token_ids):
            if output.logprobs:
                self._held_scores.append((self._decoded, ScoredToken(token_id, output.logprobs[index])))
            self._token_ids.append(token_id)
            if self._emit(self._detokenizer.push(token_id), piece):
                return self._finished(piece, "stop", None)
        if output.finish_reason is None:
            self._release_scores(piece)
            return piece
        if self._emit(self._detokenizer.flush(), piece):
            return self._finished(piece, "stop", output.stats)
        piece.text += self._stop.flush()
        self._emitted = self._decoded + 1  # all is out, also tokens without any text
        reason = "length" if output.finish_reason == "length" else "stop"  # an error has been raised before
        return self._finished(piece, reason, output.stats)

    def _emit(self, text: str, piece: Piece) -> bool:
        """Add to `piece` what is safe to show. True: a stop string was met."""
        self._decoded += len(text)
        too_early = len(self._token_ids) < self._request.params.min_tokens
        safe, stopped = (text, False) if too_early else self._stop.push(text)
        piece.text += safe
        self._emitted += len(safe)
        return stopped

    def _release_scores(self, piece: Piece) -> None:
        """A token's score goes out with the first of its text; those within a stop string never do."""
        piece.scores += [score for start, score in self._held_scores if start < self._emitted]
        self._held_scores = [held for held in self._held_scores if held[0] >= self._emitted]

    def _finished(self, piece: Piece, reason: FinishReason, stats: RequestStats | None) -> Piece:
        self._release_scores(piece)
        piece.finish_reason = reason
        piece.usage = _usage(stats) if stats is not None else self._own_usage()
        return piece

    def _own_usage(self) -> Usage:
        """For an answer that a stop string ended: the engine did not, so it has not counted."""
        draft = self._request.draft_ids
        pairs = zip(draft, self._token_ids, strict=False)
        accepted = next(
            (i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(draft), len(self._token_ids))
        )
        return Usage.of(
            len(self._request.prompt_ids),
            len(self._token_ids),
            cached=self._cached_tokens,
            accepted=accepted,
            rejected=len(draft) - accepted,
        )


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
