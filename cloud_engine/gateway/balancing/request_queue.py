"""The queue of requests that wait while every node is full: bounded, by priority, and fair between tenants."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from ....protocol.errors import OverloadedError, UpdraftError
from ..access.principal import PRIORITIES, Priority
from .node import Node


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """The attributes of a request that decide when it leaves the queue."""

    priority: Priority = "interactive"
    # Tenant of the request. Tenants with requests of the same priority take turns.
    tenant: str = ""
    # Share of the tenant at nodes with `--scheduling-policy fair`, relative to other tenants.
    weight: float = 1.0


@dataclass(eq=False, slots=True)
class _Waiter:
    place: QueuePlace
    # Key shared by all requests that the same nodes can serve.
    nodes_key: Hashable
    # Reserves and returns a node; None if all nodes are full. Raises UpdraftError if no node can serve the request.
    take: Callable[[], Node | None]
    # Resolves to the node reserved for the request.
    placed: asyncio.Future[Node] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def is_placed(self) -> bool:
        """Try to reserve a node now. Return whether the wait has ended, with a node or with an error from `take`."""
        try:
            node = self.take()
        except UpdraftError as error:
            self.placed.set_exception(error)
            return True
        if node is not None:
            self.placed.set_result(node)
        return node is not None


_TenantQueues = OrderedDict[str, deque[_Waiter]]
"""The waiting requests of one priority, by tenant, in the order of their turns."""


class RequestQueue:
    """A queue of up to `most` requests. When full, it drops a less important request or refuses the new one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._queues: dict[Priority, _TenantQueues] = {priority: OrderedDict() for priority in PRIORITIES}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def by_priority(self) -> dict[Priority, int]:
        """Return the number of queued requests by priority."""
        return {priority: sum(map(len, queues.values())) for priority, queues in self._queues.items()}

    def check(self, place: QueuePlace) -> None:
        """Refuse a request if the queue is full and none can be dropped for it. Raises OverloadedError."""
        if 0 < self._size >= self._most and self._victim(place) is None:  # without queued requests, a node may be free
            raise _full()

    async def wait(
        self, place: QueuePlace, nodes_key: Hashable, take: Callable[[], Node | None], give_back: Callable[[Node], None]
    ) -> Node:
        """Wait until `take` returns a node for this request. Raises OverloadedError if the queue is full."""
        if self._size >= self._most:
            if (victim := self._victim(place)) is None:
                raise _full()
            self._remove(victim)
            if not victim.placed.done():  # done if the victim's client has disconnected
                victim.placed.set_exception(_full())
        waiter = _Waiter(place, nodes_key, take)
        self._queues[place.priority].setdefault(place.tenant, deque()).append(waiter)
        self._size += 1
        self.serve()
        try:
            return await waiter.placed
        except asyncio.CancelledError:
            if waiter.placed.done() and not waiter.placed.cancelled() and waiter.placed.exception() is None:
                give_back(waiter.placed.result())
            raise
        finally:
            self._remove(waiter)

    def serve(self) -> None:
        """Serve every request that some node can take. Call after any change that may free capacity."""
        full: set[Hashable] = set()
        for queues in self._queues.values() if self._size else ():
            while sum(self._serve_tenant(waiters, full) for waiters in tuple(queues.values())):
                pass  # each round places one request per tenant, until no node has capacity

    def _serve_tenant(self, waiters: Iterable[_Waiter], full: set[Hashable]) -> bool:
        """Place one request of a tenant, and give the next turn to other tenants. Return False if none fits."""
        for waiter in tuple(waiters):
            if waiter.nodes_key in full or waiter.placed.done():
                continue
            if waiter.is_placed():
                self._queues[waiter.place.priority].move_to_end(waiter.place.tenant)
                self._remove(waiter)
                return True
            full.add(waiter.nodes_key)
        return False

    def _remove(self, waiter: _Waiter) -> None:
        queues = self._queues[waiter.place.priority]
        waiters = queues.get(waiter.place.tenant)
        if waiters is not None and waiter in waiters:
            waiters.remove(waiter)
            self._size -= 1
            if not waiters:
                del queues[waiter.place.tenant]

    def _victim(self, place: QueuePlace) -> _Waiter | None:
        """Return the queued request to drop for a new one, or None if no request may be dropped.

        Requests of the lowest priority are dropped first. Among them, the newest request of the tenant with the most
        requests is dropped. At the new request's own priority, a request is dropped only if its tenant has more queued
        requests than the new one's tenant.
        """
        for priority in reversed(PRIORITIES):
            if queues := self._queues[priority]:
                largest = max(queues.values(), key=len)
                if priority == place.priority and len(largest) <= len(queues.get(place.tenant, ())) + 1:
                    return None
                return largest[-1]
            if priority == place.priority:
                return None
        return None


def _full() -> OverloadedError:
    return OverloadedError("All nodes are busy and the request queue is full: try again shortly.")
