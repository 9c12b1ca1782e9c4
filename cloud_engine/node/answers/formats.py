"""The two wire formats of answers: chat completions and text completions, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from ....protocol.http.wire import new_id
from ....protocol.responses import (
    AnswerNotes,
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatTokenLogprob,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    Usage,
    fingerprint,
)
from ....protocol.sampling import SamplingDefaults
from ....text.tokenizer import Tokenizer
from ....text.tool_stream import AnswerParser, AnswerSyntax
from .answer_stream import Piece, total_usage


class AnswerFormat(Protocol):
    """The wire format of answers. `include_usage` ends a stream with a usage chunk; other chunks have a null usage.

    `chunks` returns the finish reason in a separate chunk after the last text.
    """

    def opening(self) -> list[msgspec.Struct]: ...
    def chunks(self, piece: Piece) -> list[msgspec.Struct]: ...
    def usage_chunk(self, usage: Usage) -> msgspec.Struct: ...
    def whole(self, answers: Sequence[Piece]) -> msgspec.Struct: ...


@dataclass(slots=True)
class WrappedFormat:
    """Base class of formats that change parts of another format."""

    answers: AnswerFormat

    def opening(self) -> list[msgspec.Struct]:
        return self.answers.opening()

    def chunks(self, piece: Piece) -> list[msgspec.Struct]:
        return self.answers.chunks(piece)

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        return self.answers.usage_chunk(usage)

    def whole(self, answers: Sequence[Piece]) -> msgspec.Struct:
        return self.answers.whole(answers)


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Join the pieces of each answer. Return one piece per answer, in the order of the answers."""
    of_answer: dict[int, list[Piece]] = {}
    for piece in pieces:
        of_answer.setdefault(piece.index, []).append(piece)
    return [_join(of_answer[index]) for index in sorted(of_answer)]


def _join(pieces: Sequence[Piece]) -> Piece:
    text, scores = "".join(piece.text for piece in pieces), [score for piece in pieces for score in piece.scores]
    of_prompt = [score for piece in pieces for score in piece.prompt_scores]
    return replace(pieces[-1], text=text, scores=scores, prompt_scores=of_prompt)


@dataclass(slots=True)
class ChatFormat:
    tokenizer: Tokenizer
    model: str
    logprobs: bool
    n: int = 1
    include_usage: bool = False
    sampling: SamplingDefaults | UnsetType = UNSET
    notes: AnswerNotes | UnsetType = UNSET
    syntax: AnswerSyntax = field(default_factory=AnswerSyntax)
    id: str = field(default_factory=lambda: new_id("chatcmpl"))
    created: int = field(default_factory=lambda: int(time.time()))
    _readers: dict[int, AnswerParser | None] = field(default_factory=dict[int, "AnswerParser | None"])

    def opening(self) -> list[msgspec.Struct]:
        role = Delta(content="", role="assistant")
        return [self._chunk([ChunkChoice(role, index=index)]) for index in range(self.n)]

    def chunks(self, piece: Piece) -> list[msgspec.Struct]:
        delta, reason = Delta(content=piece.text or None), piece.finish_reason
        if (reader := self._readers.setdefault(piece.index, self.syntax.parser())) is not None:
            delta, reason = reader.read(piece.text, reason)
        choices = [ChunkChoice(delta, None, piece.index, self._scores(piece), token_ids=piece.token_ids or UNSET)]
        if reason is not None:
            has_content = delta != Delta() or piece.scores
            finish = ChunkChoice(Delta(), reason, piece.index, stop_reason=piece.stop_reason or UNSET)
            choices = [*(choices if has_content else ()), finish]
        chunks = [self._chunk([choice]) for choice in choices]
        if reason is not None:
            chunks[-1].updraft, chunks[-1].sampling = self.notes, self.sampling
        return list[msgspec.Struct](chunks)

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        return self._chunk([], usage)

    def whole(self, answers: Sequence[Piece]) -> msgspec.Struct:
        choices: list[ChatChoice] = []
        for answer in answers:
            message, reason = AssistantMessage(answer.text), answer.finish_reason
            if (reader := self.syntax.parser()) is not None:
                message, reason = reader.whole(answer.text, reason)
            if reason is not None:
                scores, stop_reason = self._scores(answer), answer.stop_reason or UNSET
                choices.append(ChatChoice(message, reason, answer.index, scores, stop_reason))
        return ChatCompletion(
            id=self.id,
            model=self.model,
            created=self.created,
            system_fingerprint=fingerprint(self.model),
            choices=choices,
            usage=total_usage(answers),
            sampling=self.sampling,
            updraft=self.notes,
        )

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None = None) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(id=self.id, model=self.model, created=self.created, choices=choices)
        chunk.system_fingerprint = fingerprint(self.model)
        if self.include_usage:
            chunk.usage = usage
        return chunk

    def _scores(self, piece: Piece) -> ChoiceLogprobs | None:
        if not self.logprobs:
            return None
        return ChoiceLogprobs(_shown(self.tokenizer, piece))


@dataclass(slots=True)
class TextFormat:
    tokenizer: Tokenizer
    model: str
    logprobs: bool
    n: int = 1
    include_usage: bool = False
    sampling: SamplingDefaults | UnsetType = UNSET
    notes: AnswerNotes | UnsetType = UNSET
    id: str = field(default_factory=lambda: new_id("cmpl"))
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self) -> list[msgspec.Struct]:
        return []

    def chunks(self, piece: Piece) -> list[msgspec.Struct]:
        choices = [TextChoice(piece.text, None, piece.index, self._scores(piece), token_ids=piece.token_ids or UNSET)]
        if piece.finish_reason is not None:
            has_content = piece.text or piece.scores or piece.prompt_scores
            choices = [
                *(choices if has_content else ()),
                TextChoice("", piece.finish_reason, piece.index, self._scores(Piece())),
            ]
        chunks = [self._completion([choice]) for choice in choices]
        if piece.finish_reason is not None:
            chunks[-1].updraft, chunks[-1].sampling = self.notes, self.sampling
        return list[msgspec.Struct](chunks)

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        return self._completion([], usage)

    def whole(self, answers: Sequence[Piece]) -> msgspec.Struct:
        completion = self._completion([self._choice(answer) for answer in answers], total_usage(answers))
        completion.updraft, completion.sampling = self.notes, self.sampling
        return completion

    def _choice(self, answer: Piece) -> TextChoice:
        scores, stop_reason = self._scores(answer), answer.stop_reason or UNSET
        return TextChoice(answer.text, answer.finish_reason, answer.index, scores, stop_reason)

    def _completion(self, choices: list[TextChoice], usage: Usage | None = None) -> TextCompletion:
        completion = TextCompletion(id=self.id, model=self.model, created=self.created, choices=choices)
        completion.system_fingerprint = fingerprint(self.model)
        if usage is not None or self.include_usage:
            completion.usage = usage
        return completion

    def _scores(self, piece: Piece) -> TextLogprobs | None:
        if not self.logprobs:
            return None
        return TextLogprobs.of(_shown(self.tokenizer, piece), [scored.offset for scored in piece.scores])


def _shown(tokenizer: Tokenizer, piece: Piece) -> list[ChatTokenLogprob]:
    """Return the log-probabilities of a piece's tokens. Special tokens, such as the end token, are shown by name."""
    token_bytes, scores = partial(tokenizer.token_bytes, skip_special=False), piece.scores
    return [ChatTokenLogprob.of(each.token_id, each.score.logprob, each.score.top, token_bytes) for each in scores]
