"""Bounded queue for an exclusive resource, with round-robin scheduling between tenants and a wait timeout."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ..protocol.errors import OverloadedError

_Place = asyncio.Future[None]


class FairQueue:
    """Fair queue for one event loop. If the queue is full, the tenant with the most waiters loses its newest waiter."""

    def __init__(self, what: str, *, max_waiting: int, timeout_s: float) -> None:
        """Create a queue for a resource, which error messages call `what`. `timeout_s` limits each wait."""
        self._what = what
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._taken = False
        self._waiting: dict[str, deque[_Place]] = {}  # waiters by tenant; the first tenant is next

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncGenerator[None]:
        """Hold the resource within the block. Raises OverloadedError if the queue is full, or on timeout."""
        if self._taken:
            await self._wait(tenant)
        self._taken = True
        try:
            yield
        finally:
            self._grant_next()

    async def _wait(self, tenant: str) -> None:
        if sum(map(len, self._waiting.values())) >= self._max_waiting:
            self._evict(tenant)
        place: _Place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(place)  # cancelling the wait must not cancel a turn that is granted meanwhile
        except BaseException as error:
            if not place.done():
                self._leave(tenant, place)
            elif place.exception() is None:
                self._grant_next()  # this waiter gave up, but the turn was already granted
            if isinstance(error, TimeoutError):
                raise _overloaded(f"The wait in the queue for {self._what} exceeded {self._timeout_s:g} s") from error
            raise

    def _evict(self, tenant: str) -> None:
        """Reject the newest waiter of the tenant with the most waiters, counting the new waiter of `tenant`."""
        most = max(self._waiting, key=lambda one: len(self._waiting[one]))
        if len(self._waiting[most]) <= len(self._waiting.get(tenant, ())) + 1:
            raise _overloaded(f"The queue for {self._what} is full ({self._max_waiting})")
        place = self._waiting[most][-1]
        self._leave(most, place)
        place.set_exception(_overloaded(f"The queue for {self._what} is full, mostly of your requests"))

    def _grant_next(self) -> None:
        self._taken = bool(self._waiting)
        if self._taken:
            tenant = next(iter(self._waiting))
            places = self._waiting.pop(tenant)
            places.popleft().set_result(None)
            if places:
                self._waiting[tenant] = places  # the tenant moves to the end of the rotation

    def _leave(self, tenant: str, place: _Place) -> None:
        self._waiting[tenant].remove(place)
        if not self._waiting[tenant]:
            del self._waiting[tenant]


def _overloaded(fault: str) -> OverloadedError:
    return OverloadedError(f"{fault}: try again later.")
