"""Runs the stages of `bench.cascade`, each a set of questions to one model, and shows their progress."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...bench.cascade.run import Reply, Stage, TaskOutcome, run_stage
from .watch import Watch

if TYPE_CHECKING:
    from ...router.config import RouterConfig


def run_stages(
    config: RouterConfig,
    stages: Sequence[Stage],
    watch: Watch,
    *,
    on_reply: Callable[[Stage, int], None] = lambda _stage, _done: None,
) -> dict[str, TaskOutcome]:
    """Run the stages (sets of questions) one after the other through one client. Return each stage's outcome by name.

    `on_reply` is called after each reply with the stage and the number of its replies so far.
    """
    from ... import AsyncOpenAI

    async def run() -> dict[str, TaskOutcome]:
        outcomes: dict[str, TaskOutcome] = {}
        async with AsyncOpenAI(config=config) as client:
            for stage in stages:
                with watch.stage(stage.name, len(stage.questions)) as advance:
                    outcomes[stage.name] = await run_stage(client, stage, _progress(stage, advance, on_reply))
        return outcomes

    return asyncio.run(run())


def _progress(
    stage: Stage, advance: Callable[[str], None], on_reply: Callable[[Stage, int], None]
) -> Callable[[Reply], None]:
    """Return a function that counts the stage's replies and updates its progress note."""
    counts = Counter[str]()

    def progress(reply: Reply) -> None:
        to_cloud = reply.info is not None and reply.info.route in ("cloud", "escalated")
        counts.update(done=1, right=reply.right, failed=reply.error is not None, cloud=to_cloud)
        note = f"{counts['right'] / counts['done']:.0%} right"
        if stage.model == "auto":
            note += f", {counts['cloud'] / counts['done']:.0%} to the cloud"
        if counts["failed"]:
            note += f", {counts['failed']} without an answer"
        advance(note)
        on_reply(stage, counts["done"])

    return progress
