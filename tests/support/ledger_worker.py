"""A worker process that opens rows of the usage ledger, settles them unless `--hold`, and prints committed rows."""

from __future__ import annotations

import asyncio
import sys

from updraft.cloud_engine.gateway.ledger.ledger import UsageLedger
from updraft.cloud_engine.gateway.ledger.metering import UsageRow
from updraft.cloud_engine.gateway.ledger.opening import open_store


def row(number: int) -> UsageRow:
    return UsageRow(request_id=f"request-{number}", key_name="k", key_id="k", model="m", node="n")


async def work(where: str, requests: int, settles: bool) -> None:
    ledger = UsageLedger(open_store(where))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)

    async def ask(number: int) -> None:
        opened = row(number)
        await ledger.open(opened)
        print("opened", opened.id, flush=True)
        if settles:
            await asyncio.sleep(0.001)
            opened.status, opened.completion_tokens = 200, number
            ledger.settle(opened)

    for first in range(0, requests, 20):
        await asyncio.gather(*(ask(number) for number in range(first, first + 20)))
    await asyncio.to_thread(ledger.flush)
    print("done", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    ledger.close()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], int(sys.argv[2]), sys.argv[3:] != ["--hold"]))
