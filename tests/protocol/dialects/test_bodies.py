"""A translated body: whoever closes it, at whatever point, closes what it is made of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from updraft.protocol.http.sse import TranslatedBody


class Body:
    """Three events, and then as `ending` says."""

    def __init__(self, ending: type[BaseException] = StopAsyncIteration) -> None:
        self.closed = 0
        self._left = 3
        self._ending = ending

    def __aiter__(self) -> Body:
        return self

    async def __anext__(self) -> bytes:
        if not self._left:
            raise self._ending
        self._left -= 1
        return b"data: %d\n\n" % self._left

    async def aclose(self) -> None:
        self.closed += 1


async def doubled(payloads: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    async for payload in payloads:
        yield payload * 2


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_body_can_be_closed_after_any_event(taken: int) -> None:
    async def go() -> tuple[list[bytes], int]:
        body = Body()
        translated = TranslatedBody(body, doubled)
        chunks = [await anext(translated) for _ in range(taken)]
        await translated.aclose()
        return chunks, body.closed

    assert asyncio.run(go()) == ([b"22", b"11", b"00"][:taken], 1)


@pytest.mark.parametrize("ending", [StopAsyncIteration, ValueError, asyncio.CancelledError])
def test_an_end_or_a_failure_closes_it(ending: type[BaseException]) -> None:
    async def go() -> int:
        body = Body(ending)
        translated = TranslatedBody(body, doubled)
        with pytest.raises(ending):
            for _ in range(4):
                await anext(translated)
        return body.closed

    assert asyncio.run(go()) == 1
