"""The requests that wait while every node has as many as it may: a bounded line in order of priority, then arrival."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from ....protocol.errors import OverloadedError, UpdraftError
from ..access.principal import PRIORITIES, Priority
from .node import Node


@dataclass(eq=False, slots=True)
class _Waiter:
    # The same for all whom the same nodes can take.
    alike: Hashable
    # A node that has room, or None. Raises UpdraftError where no node is left.
    take: Callable[[], Node | None]
    # The node that was taken for it.
    placed: asyncio.Future[Node] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def is_placed(self) -> bool:
        """Try to place it now, or let it know that it cannot be."""
        try:
            node = self.take()
        except UpdraftError as error:
            self.placed.set_exception(error)
            return True
        if node is not None:
            self.placed.set_result(node)
        return node is not None


class WaitingLine:
    """At most `most` requests. Of a longer line the lowest class is shed, the latest first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lines: dict[Priority, deque[_Waiter]] = {priority: deque() for priority in PRIORITIES}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def by_priority(self) -> dict[Priority, int]:
        return {priority: len(line) for priority, line in self._lines.items()}

    def check(self, priority: Priority) -> None:
        """Raises OverloadedError where the line is full, and none in it would make room for one of this class."""
        if len(self) >= self._most and not any(self._lines[lower] for lower in _below(priority)):
            raise _full()

    async def wait(
        self, priority: Priority, alike: Hashable, take: Callable[[], Node | None], give_back: Callable[[Node], None]
    ) -> Node:
        """A node, once `take` finds one for this request. Raises OverloadedError where the line is full."""
        self.check(priority)
        if len(self) >= self._most:
            self._shed_below(priority)
        waiter = _Waiter(alike, take)
        self._lines[priority].append(waiter)
        self.move()
        try:
            return await waiter.placed
        except asyncio.CancelledError:
            if waiter.placed.done() and not waiter.placed.cancelled() and waiter.placed.exception() is None:
                give_back(waiter.placed.result())
            raise
        finally:
            if waiter in self._lines[priority]:
                self._lines[priority].remove(waiter)

    def move(self) -> None:
        """Some node may have room: place whom it can take."""
        full: set[Hashable] = set()
        for line in self._lines.values():
            for waiter in tuple(line):
                if waiter.alike in full or waiter.placed.done():
                    continue
                if waiter.is_placed():
                    line.remove(waiter)
                else:
                    full.add(waiter.alike)

    def _shed_below(self, priority: Priority) -> None:
        """Make room for one of this class, for which somebody in line can make it."""
        line = next(self._lines[lower] for lower in _below(priority) if self._lines[lower])
        waiter = line.pop()
        if not waiter.placed.done():  # else its client has just left
            waiter.placed.set_exception(_full())


def _below(priority: Priority) -> Sequence[Priority]:
    """The lower classes, the lowest first."""
    return PRIORITIES[: PRIORITIES.index(priority) : -1]


def _full() -> OverloadedError:
    return OverloadedError("All nodes are busy, and the line of waiting requests is full: try again in a moment.")
