"""Reads a streamed body for another thread. Joins ready chunks, because each transfer between threads is slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from ..protocol.http.wire import close_body

_MOST_BYTES = 2**16  # maximum bytes in the buffer; then reading pauses


class ReadAhead:
    """Reads `body` on the router's event loop: all ready chunks during `take`, and one between calls of `take`."""

    def __init__(self, body: AsyncIterator[bytes]) -> None:
        self._body = body
        self._waiting = bytearray()
        self._filled, self._wanted = asyncio.Event(), asyncio.Event()
        self._ended = False
        self._reading: asyncio.Task[None] | None = None

    async def take(self) -> tuple[bytes, bool]:
        """Wait for bytes. Return all buffered bytes, and whether the stream has ended.

        Raises the body's error once all earlier bytes are taken. Cancelling this call stops the body.
        """
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        self._wanted.set()
        try:
            if self._filled.is_set():
                await asyncio.sleep(0)  # lets the body add more chunks that are ready
            await self._filled.wait()
        except asyncio.CancelledError:
            self._reading.cancel()
            raise
        taken, ended = bytes(self._waiting), self._ended
        self._waiting.clear()
        self._wanted.clear()
        if not ended:
            self._filled.clear()
            return taken, False
        await asyncio.wait([self._reading])
        if taken and self._reading.exception() is not None:
            return taken, False  # the next call raises the error
        self._reading.result()
        return taken, True

    async def aclose(self) -> None:
        """Stop reading, and close the body."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)  # nobody reads the body's errors now
        await close_body(self._body)

    async def _read(self) -> None:
        try:
            async for chunk in self._body:
                self._waiting += chunk
                self._filled.set()
                if len(self._waiting) >= _MOST_BYTES:
                    self._wanted.clear()
                await self._wanted.wait()
        finally:
            self._ended = True
            self._filled.set()
