"""Mailbox from the engine's thread to a reader, which may be a thread or a coroutine."""

from __future__ import annotations

import contextlib
import queue
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class Mailbox(Generic[T]):
    """An unbounded queue with one reader, which waits in a thread (`get`) or in an event loop (`get_async`).

    `put` never blocks and takes no lock that Python code can hold, so finalizers may call it at any time.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        self._items.put(item)
        if (waiter := self._waiter) is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed, so no reader waits
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    def get(self) -> T:
        return self._items.get()

    async def get_async(self) -> T:
        import asyncio  # imported late, because readers in threads do not need the module's megabytes

        while True:
            # Set before the check, so that a `put` after the check finds the waiter.
            self._waiter = waiter = asyncio.get_running_loop().create_future()
            try:
                return self._items.get_nowait()
            except queue.Empty:
                await waiter
            finally:
                self._waiter = None


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
