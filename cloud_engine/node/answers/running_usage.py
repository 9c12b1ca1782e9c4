"""The usage of a request so far, for who pays for answers that break off: on each chunk of a stream, or when asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from ....protocol.errors import NotFoundError
from ....protocol.responses import ChatCompletionChunk, TextCompletion, TokenCounts
from ...engine.types.request import GenerationRequest
from .answer_stream import Piece
from .formats import WrappedFormat

_KEPT = 4096


class TokenCounter:
    """`so_far`: the tokens of all answers to a request, and of those of its prompts that have been answered."""

    def __init__(self, generations: Sequence[GenerationRequest]) -> None:
        """`generations`: what it asks, one of each prompt."""
        self.so_far = TokenCounts()
        self._prompt_tokens = [len(generation.prompt_ids) for generation in generations]
        self._prompts: set[int] = set()
        self._tokens: dict[int, int] = {}  # of each answer

    def add(self, piece: Piece) -> None:
        so_far = self.so_far
        if piece.prompt not in self._prompts:
            self._prompts.add(piece.prompt)
            so_far.prompt_tokens += self._prompt_tokens[piece.prompt]
        so_far.completion_tokens += piece.num_tokens - self._tokens.get(piece.index, 0)
        so_far.total_tokens = so_far.prompt_tokens + so_far.completion_tokens
        self._tokens[piece.index] = piece.num_tokens


@dataclass(slots=True)
class RunningUsage(WrappedFormat):
    """vLLM's `continuous_usage_stats`: the chunks of `answers`, each with the tokens so far."""

    counter: TokenCounter

    def chunks(self, piece: Piece) -> list[msgspec.Struct]:
        shown = self.answers.chunks(piece)
        self.counter.add(piece)
        for chunk in shown:
            if isinstance(chunk, ChatCompletionChunk | TextCompletion):
                chunk.usage = self.counter.so_far
        return shown


class Spent:
    """The same of whole answers, which say nothing before their end: by the names that gateways give their attempts.

    The last few thousand are known, whatever has become of them.
    """

    def __init__(self) -> None:
        self._counts: dict[str, TokenCounts] = {}

    def on(self, attempt: str) -> TokenCounts:
        """Raises NotFoundError."""
        if attempt not in self._counts:
            raise NotFoundError(f"There was no attempt {attempt!r} here lately.")
        return self._counts[attempt]

    async def watch(self, attempt: str, counter: TokenCounter, answer: AsyncGenerator[Piece]) -> AsyncGenerator[Piece]:
        """The same pieces."""
        self._counts[attempt] = counter.so_far
        if len(self._counts) > _KEPT:
            del self._counts[next(iter(self._counts))]
        async with aclosing(answer):
            async for piece in answer:
                counter.add(piece)
                yield piece
