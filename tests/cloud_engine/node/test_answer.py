"""What becomes of an engine's outputs, and what an engine is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from updraft.cloud_engine.engine.request import GenerationRequest, TokenOutput
from updraft.cloud_engine.node.answer import pieces
from updraft.protocol.sampling import SamplingParams


class Letters:
    """Token 1 is an a, and so on."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([96 + token_id])


class Source:
    """Two answers, token by token: abcd.. and bcde.."""

    def __init__(self) -> None:
        self.stopped: list[tuple[str, int]] = []
        self.sent = [0, 0]

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput]:
        for token in range(1, 9):
            for index in (0, 1):
                if (request.request_id, index) not in self.stopped:
                    self.sent[index] += 1
                    yield TokenOutput(request.request_id, [token + index], index=index)

    def stop_answer(self, request_id: str, index: int) -> None:
        self.stopped.append((request_id, index))


def test_the_engine_hears_of_an_answer_that_a_stop_string_ends() -> None:
    source: Any = Source()
    request = GenerationRequest("r", [1], SamplingParams(stop=("c",)), n=2)

    async def texts() -> list[str]:
        found = ["", ""]
        async for piece in pieces(source, Letters(), request):  # type: ignore[arg-type]
            found[piece.index] += piece.text
        return found

    assert asyncio.run(texts()) == ["ab", "b"]
    assert source.stopped == [("r", 1)], "and not of the last one, with which all is over"
    assert source.sent == [3, 2]
