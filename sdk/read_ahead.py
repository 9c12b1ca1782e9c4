"""A streamed body on its way to another thread: all that is ready crosses together, since each crossing costs time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

_MOST_BYTES = 2**16  # that wait for the reader


class ReadAhead:
    """Reads `body` in the router's loop: what is ready at once, and one piece more while nobody waits for it."""

    def __init__(self, body: AsyncIterator[bytes]) -> None:
        self._body = body
        self._waiting = bytearray()
        self._filled, self._wanted = asyncio.Event(), asyncio.Event()
        self._ended = False
        self._reading: asyncio.Task[None] | None = None

    async def take(self) -> tuple[bytes, bool]:
        """What has come, once there is something, and whether that is the end.

        Raises what the body raised, once all before is taken. Cancelled: the body is stopped.
        """
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        self._wanted.set()
        try:
            if self._filled.is_set():
                await asyncio.sleep(0)  # for what is ready behind it
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
            return taken, False  # the next call raises it
        self._reading.result()
        return taken, True

    async def aclose(self) -> None:
        """Stop the body."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)  # nobody is there to be told
        close: Any = getattr(self._body, "aclose", None)
        if close is not None:
            await close()

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
