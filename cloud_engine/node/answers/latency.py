"""Latencies as users see them: time to first token, per token and to the end, and the finish reasons."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ....protocol.http.prometheus import Distribution
from ....protocol.responses import FinishReason
from .answer_stream import Piece

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Latencies:
    """Measures the latencies of answers. The time to the first token includes queueing."""

    def __init__(self) -> None:
        self.ttft = Distribution(_SECONDS)
        self.tpot = Distribution(_SECONDS)
        self.e2e = Distribution(_SECONDS)
        self.finished: Counter[FinishReason] = Counter()

    async def watch(self, answers: AsyncGenerator[Piece], started: float) -> AsyncGenerator[Piece]:
        """Yield the same pieces and measure them. `started`: time of the request, by `time.perf_counter`.

        Only finished answers count, except for the time to the first token.
        """
        begun: dict[int, float] = {}
        async with aclosing(answers):
            async for piece in answers:
                now = time.perf_counter()
                if not begun:
                    self.ttft.observe(now - started)
                first = begun.get(piece.index)
                begun.setdefault(piece.index, now)
                if piece.finish_reason is not None and piece.usage is not None:
                    self.finished[piece.finish_reason] += 1
                    self.e2e.observe(now - started)
                    if first is not None and piece.usage.completion_tokens > 1:  # one token has no time between tokens
                        self.tpot.observe((now - first) / (piece.usage.completion_tokens - 1))
                yield piece
