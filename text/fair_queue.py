"""Turns at something that serves one at a time: tenants take them in rotation, and few wait, and not for long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ..protocol.errors import OverloadedError

_Place = asyncio.Future[None]


class FairQueue:
    """For one event loop. At most `max_waiting` wait; where that is not enough, who waits most often is sent away."""

    def __init__(self, what: str, *, max_waiting: int, timeout_s: float) -> None:
        """`what` is waited for, in words."""
        self._what = what
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._taken = False
        self._waiting: dict[str, deque[_Place]] = {}  # who is next comes first

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncGenerator[None]:
        """Raises OverloadedError if too many wait, or after too long."""
        if self._taken:
            await self._wait(tenant)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: str) -> None:
        if sum(map(len, self._waiting.values())) >= self._max_waiting:
            self._make_room(tenant)
        place: _Place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(place)  # so that it can be given the turn until this is told of its end
        except BaseException as error:
            if not place.done():
                self._leave(tenant, place)
            elif place.exception() is None:
                self._pass_on()  # it was given the turn as it left
            if isinstance(error, TimeoutError):
                raise self._overloaded(f"took longer than {self._timeout_s:g} s") from error
            raise

    def _make_room(self, tenant: str) -> None:
        """Send the last of those away that wait most, or the one who comes, if that is one of them."""
        most = max(self._waiting, key=lambda one: len(self._waiting[one]))
        if len(self._waiting[most]) <= len(self._waiting.get(tenant, ())) + 1:
            raise self._overloaded(f"is full ({self._max_waiting})")
        place = self._waiting[most][-1]
        self._leave(most, place)
        place.set_exception(self._overloaded(f"is full ({self._max_waiting}), others wait for less"))

    def _pass_on(self) -> None:
        self._taken = bool(self._waiting)
        if self._taken:
            tenant = next(iter(self._waiting))
            places = self._waiting.pop(tenant)
            places.popleft().set_result(None)
            if places:
                self._waiting[tenant] = places  # behind the others

    def _leave(self, tenant: str, place: _Place) -> None:
        self._waiting[tenant].remove(place)
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _overloaded(self, why: str) -> OverloadedError:
        return OverloadedError(f"The queue for {self._what} {why}: try again later.")
