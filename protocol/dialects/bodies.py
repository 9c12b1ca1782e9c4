"""A streamed body that is translated on its way."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from ..http import sse


class TranslatedBody:
    """`events` of the payloads of `body`. Closing it closes `body`, also where it never began."""

    def __init__(
        self, body: AsyncIterator[bytes], events: Callable[[AsyncIterator[bytes]], AsyncGenerator[bytes]]
    ) -> None:
        self._body = body
        self._events = events(sse.parse(body))

    def __aiter__(self) -> TranslatedBody:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._events)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Idempotent; the carrier cancels a pending `__anext__` first."""
        try:
            with suppress(RuntimeError):  # a step is pending: its carrier has cancelled it, or is about to
                await self._events.aclose()
        finally:
            close: Any = getattr(self._body, "aclose", None)
            if close is not None:
                await close()
