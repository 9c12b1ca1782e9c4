"""Runs the legs of `bench.cascade`, each a set of questions to one model, and shows their progress."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...bench.cascade.run import Leg, Reply, TaskOutcome, run_leg
from .watch import Watch

if TYPE_CHECKING:
    from ...router.config import RouterConfig


def run_legs(
    config: RouterConfig,
    legs: Sequence[Leg],
    watch: Watch,
    *,
    on_reply: Callable[[Leg, int], None] = lambda _leg, _done: None,
) -> dict[str, TaskOutcome]:
    """Run the legs (sets of questions) one after the other through one client. Return each leg's outcome by name.

    `on_reply` is called after each reply with the leg and the number of its replies so far.
    """
    from ... import AsyncOpenAI

    async def run() -> dict[str, TaskOutcome]:
        outcomes: dict[str, TaskOutcome] = {}
        async with AsyncOpenAI(config=config) as client:
            for leg in legs:
                with watch.stage(leg.name, len(leg.questions)) as advance:
                    outcomes[leg.name] = await run_leg(client, leg, _progress(leg, advance, on_reply))
        return outcomes

    return asyncio.run(run())


def _progress(
    leg: Leg, advance: Callable[[str], None], on_reply: Callable[[Leg, int], None]
) -> Callable[[Reply], None]:
    """Return a function that counts the leg's replies and updates its progress note."""
    counts = Counter[str]()

    def progress(reply: Reply) -> None:
        to_cloud = reply.info is not None and reply.info.route in ("cloud", "escalated")
        counts.update(done=1, right=reply.right, failed=reply.error is not None, cloud=to_cloud)
        note = f"{counts['right'] / counts['done']:.0%} right"
        if leg.model == "auto":
            note += f", {counts['cloud'] / counts['done']:.0%} to the cloud"
        if counts["failed"]:
            note += f", {counts['failed']} without an answer"
        advance(note)
        on_reply(leg, counts["done"])

    return progress
