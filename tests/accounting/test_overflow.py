"""Rows without a place in the mapped file: they outlive a kill in the overflow file, each once."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from updraft.accounting.ledger.intents import IntentFile, OverflowFile
from updraft.router.accounting.ledger import REQUESTS, Ledger, collect_rows

# Enters rows beside a busy writer, prints how many, and is killed.
PROGRAM = """
import asyncio, os, resource, sys
from dataclasses import replace
from pathlib import Path
from updraft.router.accounting.ledger import RequestWriter
from updraft.router.accounting.prices import Prices
from updraft.router.accounting.request_record import RequestRecord

path, count, length, limit = Path(sys.argv[1]), *map(int, sys.argv[2:])
row = RequestRecord(Prices(), "large").row(200)

async def work():
    writer = RequestWriter(path)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    for number in range(count):
        writer.enter(replace(row, id=f"{number:06}", reason=chr(97 + number % 26) * length))
    os.kill(os.getpid(), 9)

asyncio.run(work())
"""


def killed(path: Path, count: int, length: int = 100, limit: int = 0) -> tuple[str, list[tuple[str, str]]]:
    """What such a program said, and the rows (id, reason) of the ledger afterwards."""
    Ledger(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        command = [sys.executable, "-c", PROGRAM, str(path), str(count), str(length), str(limit)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        other.execute("ROLLBACK")
    for _ in range(2):
        collect_rows(path)
    with closing(Ledger(path)) as ledger:
        return done.stderr, sorted((row.id, row.reason) for row in ledger.rows(limit=10**6))


def expected(count: int, length: int) -> list[tuple[str, str]]:
    return [(f"{number:06}", chr(97 + number % 26) * length) for number in range(count)]


@pytest.mark.skipif(sys.platform == "win32", reason="the process is killed by signal")
@pytest.mark.parametrize(("count", "length"), [(REQUESTS.places * 3, 100), (20, 3 * REQUESTS.place_bytes)])
def test_more_rows_than_places_and_long_rows_outlive_a_kill(tmp_path: Path, count: int, length: int) -> None:
    path = tmp_path / "ledger.sqlite3"
    _, rows = killed(path, count, length)
    assert rows == expected(count, length)
    overflow = [each.stat().st_size for each in tmp_path.glob("*.workers/overflow-*")]
    assert set(overflow) <= {0}, "empty when nothing waits"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of a file's size")
def test_a_full_disk_costs_the_rows_that_do_not_fit(tmp_path: Path) -> None:
    said, rows = killed(tmp_path / "ledger.sqlite3", 40, 100_000, limit=2**20)
    assert rows == expected(len(rows), 100_000)
    assert 8 <= len(rows) <= 10
    assert said.count("Rows are only in memory until their commit") == 1, said
    assert "Traceback" not in said


@pytest.mark.parametrize("torn", [1, 4, 5, 9])
def test_a_torn_last_record_is_ignored_and_overwritten(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "overflow"
    with closing(OverflowFile(path)) as file:
        assert [file.add(each) for each in (b"first", b"second", b"third")] == [0, 9, 19]
        file.remove(9)
    os.truncate(path, 19 + torn if torn < 9 else 28)
    with closing(OverflowFile(path)) as again:
        whole = {0: b"first", 19: b"third"} if torn == 9 else {0: b"first"}
        assert again.records() == whole
        added = again.add(b"4")
        assert again.records() == {**whole, added: b"4"}
        for at in (*whole, added):
            assert at is not None
            again.remove(at)
        assert path.stat().st_size == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the process forks")
def test_a_child_of_a_fork_writes_into_no_overflow_of_its_parent(tmp_path: Path) -> None:
    with closing(IntentFile(tmp_path / "intents", places=1)) as file:
        file.add(b"mapped")
        kept = file.add(b"of the parent")
        child = os.fork()
        if child == 0:
            os._exit(file.add(b"of the child") is not None)
        assert os.waitpid(child, 0)[1] == 0
        assert file.records() == {0: b"mapped", kept: b"of the parent"}
