"""Turns: who is next, who is sent away, and that none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from updraft.protocol.errors import OverloadedError
from updraft.text.fair_queue import FairQueue


def served(arrivals: str, test: Callable[[list[asyncio.Task[None]], FairQueue], Awaitable[None]]) -> str:
    """Tenants, one letter each, arrive in this order while one is served; who was served, in order."""
    order: list[str] = []

    async def one(turns: FairQueue, tenant: str) -> None:
        async with turns.turn(tenant):
            order.append(tenant)
            await asyncio.sleep(0)

    async def run() -> None:
        turns = FairQueue("tests", max_waiting=4, timeout_s=0.5)
        async with turns.turn("first"):
            tasks = [asyncio.create_task(one(turns, tenant)) for tenant in arrivals]
            await asyncio.sleep(0.01)
            await test(tasks, turns)
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(60), turns.turn("last"):  # no turn was lost
            pass

    asyncio.run(run())
    return "".join(order)


async def nothing(_tasks: list[asyncio.Task[None]], _turns: FairQueue) -> None:
    pass


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        ("aaab", "abaa"),  # tenants in rotation
        ("aabc", "abca"),
        ("aaaaa", "aaaa"),  # the fifth is refused
        ("aaaab", "abaa"),  # only the tenant with the most waiters is evicted for another tenant
        ("abcde", "abcd"),
    ],
)
def test_tenants_take_turns_and_share_the_queue(arrivals: str, expected: str) -> None:
    assert served(arrivals, nothing) == expected


def test_rejected_waiters_get_an_error() -> None:
    async def test(tasks: list[asyncio.Task[None]], _turns: FairQueue) -> None:
        assert [task.done() for task in tasks] == [False, False, False, True, False]
        assert isinstance(tasks[3].exception(), OverloadedError)

    assert served("aaaab", test) == "abaa"


def test_waiting_ends() -> None:
    async def test(tasks: list[asyncio.Task[None]], _turns: FairQueue) -> None:
        await asyncio.sleep(0.6)
        assert all(isinstance(task.exception(), OverloadedError) for task in tasks)

    assert served("ab", test) == ""


def test_cancelled_waiter_passes_its_turn_on() -> None:
    async def test(tasks: list[asyncio.Task[None]], turns: FairQueue) -> None:
        turns._grant_next()
        tasks[0].cancel()
        await asyncio.sleep(0.01)

    assert served("ab", test) == "b"
