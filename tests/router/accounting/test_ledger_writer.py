"""A ledger that another process holds: nobody waits for it, no row is lost, and budgets come out right."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cascade_bench import run
from router_fakes import FakeCloud
from updraft.router.accounting.budget import BudgetLimits
from updraft.router.accounting.ledger import Ledger
from updraft.router.accounting.ledger_writer import CLOSING_S, LedgerWriter
from updraft.router.accounting.prices import Prices
from updraft.router.accounting.request_record import RequestRecord
from updraft.router.config import CacheSettings
from updraft.router.privacy.rules import Privacy

ROW = RequestRecord(Prices(), "large").row(200)


@contextmanager
def held(ledger: Path) -> Iterator[sqlite3.Connection]:
    """Another connection, as of another process, is in the middle of writing until it commits."""
    other = sqlite3.connect(ledger, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield other
    finally:
        other.close()


@asynccontextmanager
async def watched() -> AsyncGenerator[list[float]]:
    """For how long the event loop did nothing else, in seconds."""
    stalls: list[float] = []

    async def beat() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            stalls.append(time.monotonic() - began - 0.01)

    task = asyncio.create_task(beat())
    try:
        yield stalls
    finally:
        task.cancel()


def test_a_held_ledger_stops_nobody_and_loses_nothing(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench() as b:
            await b.answer("cloud")
            with held(b.ledger) as other:
                async with watched() as stalls:
                    answers = await asyncio.gather(*(b.answer("cloud") for _ in range(20)))
                    await asyncio.sleep(0.3)
                assert max(stalls) < 4.0, "SQLite would wait for five seconds"
                assert {answer["updraft"]["route"] for answer in answers} == {"cloud"}
                other.execute("COMMIT")
            await b.answer("cloud")
            while len(b.rows()) < 22:  # noqa: ASYNC110 - also without another request or an end
                await asyncio.sleep(0.02)
        assert len(b.rows()) == 22

    run(test())


def test_budgets_wait_for_the_ledger_and_are_settled(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(budget=BudgetLimits(cloud_tokens=1000)) as b:
            await b.answer("cloud", max_tokens=50)
            cloud.delay_s = 0.3
            begun = asyncio.create_task(b.answer("cloud", max_tokens=50))
            while len(cloud.requests) < 2:  # its reservation is made, its row is not  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            with held(b.ledger) as other:
                async with watched() as stalls:
                    waits = asyncio.create_task(b.answer("cloud", max_tokens=50))
                    assert (await begun)["updraft"]["route"] == "cloud"
                    await asyncio.sleep(0.5)
                    assert not waits.done(), "nobody knows what is left"
                    other.execute("COMMIT")
                    assert (await waits)["updraft"]["route"] == "cloud"
                assert max(stalls) < 4.0
        with sqlite3.connect(b.ledger) as connection:
            assert connection.execute("SELECT requests, cloud_tokens FROM spending").fetchall() == [(3, 3 * 15)]
        connection.close()

    run(test())


def test_who_can_spend_nothing_does_not_ask_for_the_budget(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        limited = {"budget": BudgetLimits(usd=0.0), "privacy": Privacy(patterns={"mine": "secret"})}
        async with bench(cache=CacheSettings(max_mb=1.0), **limited) as b:
            private = {"updraft": {"private": True}}
            secret = {"messages": [{"role": "user", "content": "secret"}]}
            with held(b.ledger) as other:
                for model, fields in (("local", {}), ("auto", private), ("auto", secret)):
                    for route in ("local", "cache"):
                        answer = await b.answer(model, temperature=0, **fields)
                        assert answer["updraft"]["route"] == route, "no budget had a say in it"
                other.execute("COMMIT")
            assert "budget spent" in (await b.answer())["updraft"]["reason"]
        assert not cloud.requests

    run(test())


@pytest.mark.parametrize("released", [True, False])
def test_the_end_waits_for_the_last_rows_and_says_which_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, released: bool
) -> None:
    async def test() -> None:
        path = tmp_path / "ledger.sqlite3"
        ledger_writer = LedgerWriter(Ledger(path, busy_s=0.01))
        with held(path) as other:
            ledger_writer.enter(ROW)
            if released:
                asyncio.get_running_loop().call_later(0.4, other.execute, "COMMIT")
            began = time.monotonic()
            await ledger_writer.close()
            assert time.monotonic() - began < CLOSING_S + 20
        reader = Ledger(path)
        assert [row.id for row in reader.rows()] == ([ROW.id] if released else [])
        reader.close()

    with caplog.at_level(logging.WARNING):
        run(test())
    assert ("1 requests are not in the ledger" in caplog.text) == (not released)


def test_what_cannot_be_written_keeps_nobody_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        ledger = Ledger(tmp_path / "ledger.sqlite3")
        ledger_writer = LedgerWriter(ledger)
        ledger_writer.enter(ROW)
        ledger_writer.enter(ROW)
        ledger_writer.enter(replace(ROW, id="b", gate=2**70))
        ledger_writer.enter(replace(ROW, id="c"))
        assert [row.id for row in ledger.rows()] == ["c", ROW.id]
        await ledger_writer.close()

    run(test())
    assert caplog.text.count("cannot be entered in the ledger") == 2
