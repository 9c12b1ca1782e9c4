"""The usage of a request so far, to bill interrupted answers: in each chunk of a stream, or on request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from ....protocol.errors import NotFoundError
from ....protocol.responses import ChatCompletionChunk, TextCompletion, Usage
from ...engine.types.request import GenerationRequest
from .answer_stream import Piece
from .formats import WrappedFormat

_KEPT = 4096


class TokenCounter:
    """Counts the tokens of one request: of all answers, and of the prompts whose answers have started."""

    def __init__(self, generations: Sequence[GenerationRequest]) -> None:
        """Start counting at 0. `generations`: the engine requests of the HTTP request, one per prompt."""
        self.so_far = Usage()
        self._prompt_tokens = [len(generation.prompt_ids) for generation in generations]
        self._prompts: set[int] = set()
        self._tokens: dict[int, int] = {}  # answer index -> tokens

    def add(self, piece: Piece) -> None:
        so_far = self.so_far
        if piece.prompt not in self._prompts:
            self._prompts.add(piece.prompt)
            so_far.prompt_tokens += self._prompt_tokens[piece.prompt]
            so_far.prompt_tokens_details.cached_tokens += piece.cached_tokens
        so_far.completion_tokens += piece.num_tokens - self._tokens.get(piece.index, 0)
        so_far.total_tokens = so_far.prompt_tokens + so_far.completion_tokens
        self._tokens[piece.index] = piece.num_tokens


@dataclass(slots=True)
class RunningUsage(WrappedFormat):
    """vLLM's `continuous_usage_stats`: adds the usage so far to each chunk."""

    counter: TokenCounter

    def chunks(self, piece: Piece) -> list[msgspec.Struct]:
        shown = self.answers.chunks(piece)
        self.counter.add(piece)
        for chunk in shown:
            if isinstance(chunk, ChatCompletionChunk | TextCompletion):
                chunk.usage = self.counter.so_far
        return shown


class UnstreamedUsage:
    """Token counts so far of the last few thousand answers that are not streamed, by the gateway's attempt id."""

    def __init__(self) -> None:
        self._counts: dict[str, Usage] = {}

    def on(self, attempt: str) -> Usage:
        """Return the tokens used so far by an attempt. Raises NotFoundError if the attempt is unknown or too old."""
        if attempt not in self._counts:
            raise NotFoundError(f"Attempt {attempt!r} is unknown or too old.")
        return self._counts[attempt]

    async def watch(self, attempt: str, counter: TokenCounter, answer: AsyncGenerator[Piece]) -> AsyncGenerator[Piece]:
        """Yield the same pieces and count their tokens."""
        self._counts[attempt] = counter.so_far
        if len(self._counts) > _KEPT:
            del self._counts[next(iter(self._counts))]
        async with aclosing(answer):
            async for piece in answer:
                counter.add(piece)
                yield piece
