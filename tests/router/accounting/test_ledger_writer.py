"""A ledger that another process holds: nobody waits for it, no row is lost, and budgets come out right."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cascade_bench import run
from router_fakes import FakeCloud
from updraft.accounting.budget import DAY_S
from updraft.accounting.ledger.intents import IntentFile
from updraft.accounting.ledger.store import SqliteStore
from updraft.accounting.ledger.table import BookedRow
from updraft.accounting.ledger.writer import CLOSE_S
from updraft.protocol.http.wire import WireRequest
from updraft.router.accounting.budget import BudgetLimits
from updraft.router.accounting.ledger import REQUESTS, Ledger, RequestWriter, collect_rows
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


def test_free_requests_skip_the_budget(bench: Any, cloud: FakeCloud) -> None:
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
def test_the_end_waits_for_the_last_rows_and_leaves_the_rest_to_the_next_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, released: bool
) -> None:
    path = tmp_path / "ledger.sqlite3"

    async def test() -> None:
        writer = RequestWriter(path)
        with held(path) as other:
            writer.enter(ROW)
            if released:
                asyncio.get_running_loop().call_later(0.4, other.execute, "COMMIT")
            began = time.monotonic()
            await writer.aclose(CLOSE_S if released else 1.0)
            assert time.monotonic() - began < CLOSE_S + 20

    with caplog.at_level(logging.WARNING):
        run(test())
    assert ("1 rows are left for the next process" in caplog.text) == (not released)
    for _ in range(2):
        collect_rows(path)
        with closing(Ledger(path)) as reader:
            assert [row.id for row in reader.rows()] == [ROW.id], "once, whoever looks how often"


def test_the_first_reservation_includes_the_rows_of_ended_processes(
    bench: Any, cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, today, collect = tmp_path / "ledger.sqlite3", int(time.time() // DAY_S), SqliteStore.orphaned_rows
    with closing(Ledger(path)) as ledger, ledger.transaction() as connection:
        connection.execute("INSERT INTO spending VALUES ('day', ?, 'all', 1, 1, 10, 0.0)", (today,))
    journal = tmp_path / "ledger.sqlite3.workers" / "intents-3"
    journal.parent.mkdir()
    with closing(IntentFile(journal, REQUESTS.places, REQUESTS.place_bytes)) as left:
        row = BookedRow(REQUESTS.values_of(ROW), ((0, 0, 990, 0.0, "day", today, "all"),))
        left.add(REQUESTS.record_of(row))

    def late(store: SqliteStore) -> Iterator[list[BookedRow]]:
        time.sleep(0.5)
        yield from collect(store)

    async def test() -> None:
        async with bench(budget=BudgetLimits(cloud_tokens=1000)) as b:
            assert (await b.ask("cloud", max_tokens=50)).status == 429
        assert not cloud.requests

    monkeypatch.setattr(SqliteStore, "orphaned_rows", late)
    run(test())


def test_refused_rows_delay_no_other_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ledger.sqlite3"

    async def test() -> None:
        writer = RequestWriter(path)
        writer.enter(ROW)
        writer.enter(ROW)
        writer.enter(replace(ROW, id="b", gate=2**70))
        writer.enter(replace(ROW, id="c"))
        await writer.aclose()

    run(test())
    with closing(Ledger(path)) as ledger:
        assert [row.id for row in ledger.rows()] == ["c", ROW.id]
    assert caplog.text.count("database refused a row") == 1


def test_a_damaged_ledger_is_reported_and_stops_no_request(
    bench: Any, cloud: FakeCloud, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with bench() as b:
            await b.answer("cloud")
            size = b.ledger.stat().st_size
            damage(b.ledger)
            assert (await b.answer("cloud"))["updraft"]["route"] == "cloud"
            await asyncio.to_thread(b.router.flush_ledger)
            assert "malformed" in str(b.router.ledger_problem)
            assert (await b.answer("cloud"))["updraft"]["route"] == "cloud"
            health = await b.handle(WireRequest("GET", "/health", {}, b""))
            assert (health.status, json.loads(health.body)["ledger"]) == (200, "unavailable")
            page = await b.handle(WireRequest("GET", "/updraft/requests", {}, b"", query="limit=5"))
            assert page.status in (200, 503), page.body
            assert b.ledger.stat().st_size >= size

    with caplog.at_level(logging.ERROR):
        run(test())
    assert "updraft doctor" in caplog.text


def damage(ledger: Path) -> None:
    """Overwrite all pages but the first, in the file and in its log."""
    with closing(sqlite3.connect(ledger)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for number in range(50):
            other.execute("INSERT INTO spending VALUES (?, 0, 'x', 0, 0, 0, 0)", (f"{number}",))
        other.execute("DELETE FROM spending")
        other.commit()
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    program = (
        "import sys; file = open(sys.argv[1], 'r+b'); file.seek(4096); file.write(b'x' * (int(sys.argv[2]) - 4096))"
    )
    subprocess.run([sys.executable, "-c", program, str(ledger), str(ledger.stat().st_size)], check=True)
