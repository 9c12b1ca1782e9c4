"""The two shapes of an answer on the wire: chat completions and text completions, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from ...protocol.ids import new_id
from ...protocol.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from ...text.tokenizer import Tokenizer
from .answer import Piece, ScoredToken


class AnswerFormat(Protocol):
    def opening(self) -> list[msgspec.Struct]: ...
    def chunk(self, piece: Piece) -> msgspec.Struct: ...
    def usage_chunk(self, usage: Usage) -> msgspec.Struct: ...
    def whole(self, answer: Piece) -> msgspec.Struct: ...


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of an answer as one."""
    scores = [score for piece in pieces for score in piece.scores]
    return Piece("".join(piece.text for piece in pieces), scores, pieces[-1].finish_reason, pieces[-1].usage)


@dataclass(slots=True)
class ChatFormat:
    tokenizer: Tokenizer
    model: str
    logprobs: bool
    id: str = field(default_factory=lambda: new_id("chatcmpl"))
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self) -> list[msgspec.Struct]:
        return [self._chunk([ChunkChoice(Delta(content="", role="assistant"))])]

    def chunk(self, piece: Piece) -> msgspec.Struct:
        delta = Delta(content=piece.text) if piece.text else Delta()
        return self._chunk([ChunkChoice(delta, piece.finish_reason, logprobs=self._scores(piece))])

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        return self._chunk([], usage)

    def whole(self, answer: Piece) -> msgspec.Struct:
        assert answer.finish_reason and answer.usage
        choice = ChatChoice(AssistantMessage(answer.text), answer.finish_reason, logprobs=self._scores(answer))
        return ChatCompletion(id=self.id, model=self.model, created=self.created, choices=[choice], usage=answer.usage)

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None = None) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(id=self.id, model=self.model, created=self.created, choices=choices)
        if usage is not None:
            chunk.usage = usage
        return chunk

    def _scores(self, piece: Piece) -> ChoiceLogprobs | None:
        if not self.logprobs:
            return None
        return ChoiceLogprobs([_token_logprob(self.tokenizer, scored) for scored in piece.scores])


@dataclass(slots=True)
class TextFormat:
    tokenizer: Tokenizer
    model: str
    logprobs: bool
    id: str = field(default_factory=lambda: new_id("cmpl"))
    created: int = field(default_factory=lambda: int(time.time()))
    _offset: int = 0

    def opening(self) -> list[msgspec.Struct]:
        return []

    def chunk(self, piece: Piece) -> msgspec.Struct:
        return self._completion([TextChoice(piece.text, piece.finish_reason, logprobs=self._scores(piece))])

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        return self._completion([], usage)

    def whole(self, answer: Piece) -> msgspec.Struct:
        return self._completion(
            [TextChoice(answer.text, answer.finish_reason, logprobs=self._scores(answer))], answer.usage
        )

    def _completion(self, choices: list[TextChoice], usage: Usage | None = None) -> TextCompletion:
        completion = TextCompletion(id=self.id, model=self.model, created=self.created, choices=choices)
        if usage is not None:
            completion.usage = usage
        return completion

    def _scores(self, piece: Piece) -> TextLogprobs | None:
        if not self.logprobs:
            return None
        scores = [_token_logprob(self.tokenizer, scored) for scored in piece.scores]
        offsets: list[int] = []
        for score in scores:
            offsets.append(self._offset)
            self._offset += len(score.token)
        return TextLogprobs(
            tokens=[score.token for score in scores],
            token_logprobs=[score.logprob for score in scores],
            top_logprobs=[{top.token: top.logprob for top in score.top_logprobs} for score in scores],
            text_offset=offsets,
        )


def _token_logprob(tokenizer: Tokenizer, scored: ScoredToken) -> TokenLogprob:
    alternatives = [TopLogprob(*_shown(tokenizer, token_id, logprob)) for token_id, logprob in scored.score.top]
    return TokenLogprob(*_shown(tokenizer, scored.token_id, scored.score.logprob), alternatives)


def _shown(tokenizer: Tokenizer, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    """Special tokens by their name: among alternatives, the end of the answer is one."""
    raw = tokenizer.token_bytes(token_id, skip_special=False)
    return raw.decode("utf-8", "replace"), logprob, list(raw)
