"""Prompts of a token a byte: a key that sent cheap prompts first gets no more of them than its limit pays for."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from updraft.cloud_engine.gateway.access.principal import Limits, Principal
from updraft.cloud_engine.gateway.ledger.metering import UsageRow
from updraft.cloud_engine.gateway.limits.accounting import Accounting, AccountingOptions, open_accounting
from updraft.cloud_engine.gateway.limits.request_size import RequestSize, size_of
from updraft.cloud_engine.gateway.relay.call import _peek
from updraft.protocol.errors import UpdraftError

PRICES = '[[prices]]\nmodel = "m"\ninput = 100.0\noutput = 0.0\n'
BYTES = 8000


def size(path: str = "chat/completions", **fields: Any) -> RequestSize:
    body = json.dumps({"model": "m", **fields}).encode()
    return size_of(body, _peek(body), path)


PROMPT = size(messages=[{"role": "user", "content": "7" * BYTES}], max_tokens=1)


async def ask(accounting: Accounting, caller: Principal, counted: int, requests: int) -> int:
    """Send requests at once, and return how many of them a node was sent."""
    async with AsyncExitStack() as in_flight:
        admitted = 0
        with suppress(UpdraftError):
            for _ in range(requests):
                row = UsageRow(request_id="id", model="m", key_id=caller.key_id, tenant=caller.tenant, status=200)
                await in_flight.enter_async_context(accounting.admitted(caller, row, PROMPT))
                row.prompt_tokens, row.completion_tokens = counted, 1
                admitted += 1
    return admitted


@pytest.mark.parametrize("trained", [0, 10, 30])
@pytest.mark.parametrize("limits", [Limits(usd_per_day=5.0), Limits(tokens_per_minute=50_000)])
def test_limits_hold_for_prompts_of_a_token_a_byte(tmp_path: Path, limits: Limits, trained: int) -> None:
    (tmp_path / "prices.toml").write_text(PRICES)

    async def work() -> int:
        accounting = open_accounting(AccountingOptions(str(tmp_path / "usage"), prices=str(tmp_path / "prices.toml")))
        caller = Principal("key_1", "tester", "acme", ("inference",), limits=limits)
        for _ in range(trained):
            assert await ask(accounting, caller, 63, 1) == 1
        admitted = await ask(accounting, caller, BYTES, 40)
        accounting.ledger.close()
        await accounting.close()
        return admitted

    assert 4 <= asyncio.run(work()) <= 6, "6 prompts cost 4.80 dollars, or 48,000 tokens"


def test_a_reranker_reads_the_query_with_each_document() -> None:
    asked = size("rerank", query="7" * BYTES, documents=["a"] * 100)
    assert 100 * BYTES < asked.prompt_tokens < 101 * BYTES
