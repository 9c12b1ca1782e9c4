"""A hedge: a second attempt beside the first, whose node is silent. The node that sends first is relayed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from ..balancing.node import Node
from .call import Call


@dataclass(slots=True)
class Race:
    """Attempts at one call, each in a task of its own. The first to send aborts the other."""

    # Told of each node whose attempt is over, however it ended.
    give_back: Callable[[Node], None]
    # The node that is relayed.
    winner: Node | None = None
    _attempts: dict[Node, asyncio.Task[None]] = field(default_factory=dict[Node, asyncio.Task[None]])

    @property
    def is_open(self) -> bool:
        """Whether an attempt runs, and none has won."""
        return self.winner is None and self.has_other(None)

    def has_other(self, node: Node | None) -> bool:
        """Whether an attempt at a node other than `node` runs."""
        return bool(self._others(node))

    def start(self, node: Node, attempt: Coroutine[None, None, None]) -> None:
        task = self._attempts[node] = asyncio.create_task(attempt)
        task.add_done_callback(lambda _: self.give_back(node))  # an attempt may be aborted before it runs

    def won_by(self, node: Node, call: Call) -> None:
        """The other attempt is aborted, as if its node had not been tried."""
        self.winner, aborted = node, self._others(node)
        for other in aborted:
            self._attempts[other].cancel()
        call.tried = [*(each for each in call.tried if each is not node and each not in aborted), node]
        call.row.node, call.row.retries = node.url, len(call.tried) - 1

    async def wait(self, seconds: float | None = None) -> None:
        """Until all attempts are over, or for so long."""
        await asyncio.wait(self._attempts.values(), timeout=seconds)

    async def abort(self) -> None:
        """What still runs, if anything; until it has ended."""
        for attempt in self._attempts.values():
            attempt.cancel()
        await asyncio.gather(*self._attempts.values(), return_exceptions=True)

    def check(self) -> None:
        """Raises what an attempt raised."""
        for attempt in self._attempts.values():
            if not attempt.cancelled():
                attempt.result()

    def _others(self, node: Node | None) -> list[Node]:
        return [other for other, task in self._attempts.items() if other is not node and not task.done()]
