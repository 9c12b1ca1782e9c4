"""Intents in a mapped file: none is lost, whatever fills up, breaks or dies in between."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import ledger_worker
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_worker import row
from updraft.accounting.ledger.intents import IntentFile
from updraft.cloud_engine.gateway.ledger.ledger import UsageLedger
from updraft.cloud_engine.gateway.ledger.opening import open_store

LONG = 1020  # bytes of the longest record


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "reopen"]), st.binary(min_size=1, max_size=LONG + 2))))
def test_intents_stay_until_removal(tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, bytes]]) -> None:
    path = tmp_path_factory.mktemp("intents") / "file"
    file, expected = IntentFile(path, places=2), dict[int, bytes]()
    for event, record in events:
        if event == "add":
            place = file.add(record)
            assert place is not None and place not in expected
            assert place >= 2 or len(record) <= LONG
            expected[place] = record
        elif event == "remove" and expected:
            place = next(iter(expected))
            file.remove(place)
            del expected[place]
        elif event == "reopen":
            file.close()
            file = IntentFile(path, places=2)
        assert file.records() == expected
    file.close()


def rows(path: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT request_id, state FROM usage ORDER BY request_id").fetchall()


def test_more_requests_than_places_all_have_rows(tmp_path: Path) -> None:
    path = tmp_path / "usage"

    async def work() -> None:
        ledger = UsageLedger(open_store(path))
        opened = [row(number) for number in range(4200)]
        await asyncio.gather(*(ledger.open(each) for each in opened))
        for each in opened[:4190]:
            ledger.settle(each)
        long = row(2000)
        long.model = "m" * LONG
        await ledger.open(long)
        ledger.close()

    asyncio.run(work())
    UsageLedger(open_store(path)).close()
    states = [state for _, state in rows(path)]
    assert (states.count("settled"), states.count("abandoned"), len(states)) == (4190, 11, 4201)


def test_settled_tokens_survive_a_kill(tmp_path: Path) -> None:
    """The database is locked, so that nothing is committed before."""
    path = tmp_path / "usage"
    program = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from ledger_worker import row\n"
        "from updraft.cloud_engine.gateway.ledger.ledger import UsageLedger\n"
        "from updraft.cloud_engine.gateway.ledger.opening import open_store\n"
        "async def work():\n"
        "    ledger = UsageLedger(open_store(Path(sys.argv[1])))\n"
        "    ledger.flush()\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    for number in range(300):\n"
        "        each = row(number)\n"
        "        await ledger.open(each)\n"
        "        each.completion_tokens = number\n"
        "        if number % 3:\n"
        "            ledger.settle(each)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(work())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(ledger_worker.__file__).parent), *sys.path])}
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            worker.communicate("go\n")
            other.execute("ROLLBACK")
    UsageLedger(open_store(path)).close()
    with closing(sqlite3.connect(path)) as connection:
        settled = set(connection.execute("SELECT request_id, state, completion_tokens FROM usage"))
    assert settled == {
        (f"request-{number}", *(("settled", number) if number % 3 else ("abandoned", 0))) for number in range(300)
    }


def test_a_file_that_was_cut_off_keeps_what_is_left(tmp_path: Path) -> None:
    file = IntentFile(tmp_path / "file")
    assert [file.add(b"%d" % number) for number in range(3)] == [0, 1, 2]
    file.close()
    os.truncate(tmp_path / "file", 2000)
    with closing(IntentFile(tmp_path / "file")) as again:
        assert again.records() == {0: b"0", 1: b"1"}


def test_a_damaged_intent_costs_itself_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "usage"

    async def work() -> None:
        ledger = UsageLedger(open_store(path))
        for number in range(3):
            await ledger.open(row(number))
        ledger.close()

    asyncio.run(work())
    with closing(IntentFile(path.with_name("usage.workers") / "intents-0")) as file:
        place, record = file.records().popitem()
        file.remove(place)
        assert file.add(record[:-9]) == place
    with caplog.at_level(logging.ERROR):
        UsageLedger(open_store(path)).close()
    assert [state for _, state in rows(path)] == ["abandoned"] * 2
    assert "record of a dead worker is damaged" in caplog.text


def test_files_of_dead_workers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    folder = path.with_name("usage.workers")
    first, second = open_store(path), open_store(path)
    first.close()
    third, fourth = open_store(path), open_store(path)
    assert {each.name for each in folder.glob("intents-*")} == {"intents-0", "intents-1", "intents-2"}
    fourth.close()
    assert list(second.orphaned_rows()) == [[]]
    assert {each.name for each in folder.glob("intents-*")} == {"intents-0", "intents-1"}
    assert {oct(each.stat().st_mode & 0o777) for each in folder.iterdir()} == {"0o600"}
    for store in (second, third):
        store.close()
