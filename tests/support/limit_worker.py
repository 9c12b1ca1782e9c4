"""A worker process that asks a limit store for many admissions at once.

Prints the number of admitted requests and the tokens that they used, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

from updraft.accounting.accounts import Claim
from updraft.cloud_engine.gateway.limits.redis_store import RedisStore
from updraft.cloud_engine.gateway.limits.shared_memory import SharedMemoryStore
from updraft.cloud_engine.gateway.limits.store import LimitStore


def open_store(where: str) -> LimitStore:
    return RedisStore(where) if "://" in where else SharedMemoryStore(Path(where))


def claims(limit: float, amount: float) -> list[Claim]:
    return [
        Claim("key", "k", "tokens", limit, amount),
        Claim("key", "k", "concurrent", 10_000, 1),
        Claim("tenant", "t", "usd_per_day", 1e6, amount / 1000, 1.0, 4e9),
    ]


async def work(where: str, requests: int, limit: float, holds: bool) -> None:
    store = open_store(where)
    used, admitted = 0, 0
    at_once = asyncio.Semaphore(16)  # a store has as many connections; on a busy machine, more would wait too long

    async def ask(number: int) -> None:
        nonlocal used, admitted
        chance = random.Random(number)
        amount = chance.randint(50, 100)
        claimed = claims(limit, amount)
        async with at_once:
            admission = await store.admit(claimed)
        if admission.refused is not None:
            return
        admitted += 1
        if holds:
            return
        await asyncio.sleep(chance.random() / 50)
        actual = chance.randint(10, amount)
        used += actual
        used_amounts = {"tokens": actual, "concurrent": 0, "usd_per_day": actual / 1000}
        async with at_once:
            await store.settle([(claim, used_amounts[claim.kind], admission.receipt) for claim in admission.claims])

    print("ready", flush=True)
    sys.stdin.readline()
    await asyncio.gather(*(ask(number) for number in range(requests)))
    print(json.dumps({"used": used, "admitted": admitted}), flush=True)
    if holds:
        sys.stdin.readline()
    await store.close()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:] == ["--hold"]))
