"""Runs the legs of `bench.cascade` and shows the progress of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...bench.cascade.run import Leg, Reply, TaskOutcome, run_leg
from .watch import Watch

if TYPE_CHECKING:
    from ...router.config import RouterConfig


def run_legs(
    config: RouterConfig, legs: Sequence[Leg], watch: Watch, *, on_reply: Callable[[Leg, int], None] | None = None
) -> dict[str, TaskOutcome]:
    """Run the legs one after the other through one client, and return each leg's outcome by name.

    `on_reply` is called after each reply with the leg and the number of its replies so far.
    """
    return asyncio.run(_run_legs(config, legs, watch, on_reply or (lambda _leg, _done: None)))


async def _run_legs(
    config: RouterConfig, legs: Sequence[Leg], watch: Watch, on_reply: Callable[[Leg, int], None]
) -> dict[str, TaskOutcome]:
    from ... import AsyncOpenAI

    outcomes: dict[str, TaskOutcome] = {}
    async with AsyncOpenAI(config=config) as client:
        for leg in legs:
            with watch.stage(leg.name, len(leg.questions)) as advance:
                progress = _LegProgress(leg, advance, on_reply)
                outcomes[leg.name] = await run_leg(client, leg, progress)
    return outcomes


class _LegProgress:
    """Counts a leg's replies as they arrive and updates its progress note."""

    def __init__(self, leg: Leg, advance: Callable[[str], None], on_reply: Callable[[Leg, int], None]) -> None:
        self._leg, self._advance, self._on_reply = leg, advance, on_reply
        self._done = self._right = self._failed = self._cloud = 0

    def __call__(self, reply: Reply) -> None:
        self._done += 1
        self._right += reply.right
        self._failed += reply.error is not None
        self._cloud += reply.info is not None and reply.info.route in ("cloud", "escalated")
        note = f"{self._right / self._done:.0%} right"
        if self._leg.model == "auto":
            note += f", {self._cloud / self._done:.0%} to the cloud"
        if self._failed:
            note += f", {self._failed} without an answer"
        self._advance(note)
        self._on_reply(self._leg, self._done)
