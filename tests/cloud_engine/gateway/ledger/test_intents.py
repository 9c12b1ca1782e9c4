"""Intents in a mapped file: none is lost, whatever fills up, breaks or dies in between."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_worker import row
from updraft.cloud_engine.gateway.ledger.intents import IntentFile
from updraft.cloud_engine.gateway.ledger.ledger import UsageLedger
from updraft.cloud_engine.gateway.ledger.store import SqliteStore

LONG = 1020  # bytes of the longest record


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "reopen"]), st.binary(min_size=1, max_size=LONG + 2))))
def test_what_was_added_stands_there_until_it_is_removed(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, bytes]]
) -> None:
    path = tmp_path_factory.mktemp("intents") / "file"
    file, expected = IntentFile(path), dict[int, bytes]()
    for event, record in events:
        if event == "add":
            place = file.add(record)
            assert (place is None) == (len(record) > LONG)
            if place is not None:
                assert place not in expected
                expected[place] = record
        elif event == "remove" and expected:
            place = next(iter(expected))
            file.remove(place)
            del expected[place]
        elif event == "reopen":
            file.close()
            file = IntentFile(path)
        assert file.records() == expected
    file.close()


def rows(path: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT request_id, state FROM usage ORDER BY request_id").fetchall()


def test_more_requests_than_places_all_have_rows(tmp_path: Path) -> None:
    path = tmp_path / "usage"

    async def work() -> None:
        ledger = UsageLedger(SqliteStore(path))
        opened = [row(number) for number in range(1100)]
        await asyncio.gather(*(ledger.open(each) for each in opened))
        for each in opened[:1090]:
            ledger.settle(each)
        long = row(2000)
        long.model = "m" * LONG
        await ledger.open(long)
        ledger.close()

    asyncio.run(work())
    UsageLedger(SqliteStore(path)).close()
    states = [state for _, state in rows(path)]
    assert (states.count("settled"), states.count("abandoned"), len(states)) == (1090, 11, 1101)


def test_a_damaged_intent_costs_itself_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "usage"

    async def work() -> None:
        ledger = UsageLedger(SqliteStore(path))
        for number in range(3):
            await ledger.open(row(number))
        ledger.close()

    asyncio.run(work())
    with closing(IntentFile(path.with_name("usage.workers") / "intents-0")) as file:
        place, record = file.records().popitem()
        file.remove(place)
        assert file.add(record[:-9]) == place
    with caplog.at_level(logging.ERROR):
        UsageLedger(SqliteStore(path)).close()
    assert [state for _, state in rows(path)] == ["abandoned"] * 2
    assert "its intent is damaged" in caplog.text


def test_files_of_dead_workers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    folder = path.with_name("usage.workers")
    first, second = SqliteStore(path), SqliteStore(path)
    first.close()
    third, fourth = SqliteStore(path), SqliteStore(path)
    assert {each.name for each in folder.glob("intents-*")} == {"intents-0", "intents-1", "intents-2"}
    fourth.close()
    assert second.abandon() == 0
    assert {each.name for each in folder.glob("intents-*")} == {"intents-0", "intents-1"}
    assert {oct(each.stat().st_mode & 0o777) for each in folder.iterdir()} == {"0o600"}
    for store in (second, third):
        store.close()
