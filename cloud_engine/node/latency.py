"""How long answers take, as users see it: histograms of the time to the first token, between tokens, and to the end."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ...protocol.prometheus import Histogram
from .answer import Piece

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Latencies:
    """Watches answers go by. Queueing is part of the time to the first token."""

    def __init__(self) -> None:
        self.ttft = Histogram("updraft_ttft_seconds", "from request to first token", _SECONDS)
        self.tpot = Histogram("updraft_tpot_seconds", "per token after the first, of one answer", _SECONDS)
        self.e2e = Histogram("updraft_e2e_seconds", "from request to last token", _SECONDS)

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        return self.ttft, self.tpot, self.e2e

    async def watch(self, answer: AsyncGenerator[Piece]) -> AsyncGenerator[Piece]:
        """The same pieces. Only answers that come to their end are counted beyond the first token."""
        started = time.perf_counter()
        first: float | None = None
        async with aclosing(answer):
            async for piece in answer:
                now = time.perf_counter()
                if first is None:
                    first = now
                    self.ttft.observe(now - started)
                if piece.finish_reason is not None and piece.usage is not None:
                    self.e2e.observe(now - started)
                    if piece.usage.completion_tokens > 1:
                        self.tpot.observe((now - first) / (piece.usage.completion_tokens - 1))
                yield piece
