"""The ledger: one row per request, from many threads, and what its totals say."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_rows import add_row
from updraft.accounting.ledger.store import SqliteStore
from updraft.protocol.errors import ConfigurationError, StorageError
from updraft.router.accounting.ledger import GROUPS, REQUESTS, Ledger, LedgerRow
from updraft.router.config import RouterConfig
from updraft.router.settings_checks import check_settings

ROW = LedgerRow(
    id="chatcmpl-0", started_at=1.0, model="auto", route="local", tier="local", gate=3, reason="P(gain)", p_gain=0.1,
    threshold=0.5, local_tokens=10, cloud_tokens=0, draft_proposed=0, draft_accepted=0, cost_usd=0.0, saved_usd=0.001,
    latency_ms=12.5, status=200,
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "ledger.sqlite3"


def test_rows_come_back_as_they_went_in(path: Path) -> None:
    ledger = Ledger(path)
    add_row(ledger, ROW)
    add_row(ledger, replace(ROW, id="chatcmpl-1", started_at=2.0, p_gain=None))
    ledger.close()
    ledger = Ledger(path)
    assert [row.id for row in ledger.rows()] == ["chatcmpl-1", "chatcmpl-0"]
    assert ledger.rows(limit=1)[0].p_gain is None
    assert ledger.get("chatcmpl-0") == ROW
    assert ledger.get("nobody") is None
    ledger.close()


def test_a_second_row_for_one_request_is_an_error(path: Path) -> None:
    ledger = Ledger(path)
    add_row(ledger, ROW)
    with pytest.raises(sqlite3.IntegrityError):
        add_row(ledger, ROW)
    ledger.close()


def test_threads_and_a_second_writer_lose_nothing(path: Path) -> None:
    ledgers = [Ledger(path), Ledger(path)]

    def write(worker: int) -> None:
        for index in range(50):
            add_row(ledgers[worker % 2], replace(ROW, id=f"chatcmpl-{worker}-{index}"))

    threads = [threading.Thread(target=write, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledgers[0].totals()[0].requests == 400
    for ledger in ledgers:
        ledger.close()


def test_totals(path: Path) -> None:
    ledger = Ledger(path)
    (empty,) = ledger.totals()
    assert (empty.requests, empty.local_share, empty.cost_usd, empty.saved_usd) == (0, None, 0.0, None)
    add_row(ledger, replace(ROW, local_prompt_tokens=3))
    escalated = replace(ROW, id="b", started_at=90_000.0, route="escalated", tier="cloud", cloud_model="big", key="k")
    add_row(ledger, replace(escalated, cloud_tokens=7, cloud_prompt_tokens=5, cost_usd=0.002, saved_usd=-0.001))
    add_row(ledger, replace(escalated, id="c", route="fallback", tier="local", saved_usd=0.0, task="sums"))
    add_row(
        ledger,
        replace(ROW, id="d", started_at=6.0, route="none", tier="none", status=502, local_tokens=0, saved_usd=0.0),
    )
    (total,) = ledger.totals()
    assert (total.requests, total.errors, total.stayed_local, total.local_share) == (4, 1, 1, pytest.approx(1 / 3))
    assert (total.local_tokens, total.cloud_tokens, total.unpriced) == (33, 12, 0)
    assert (total.cost_usd, total.saved_usd) == (pytest.approx(0.002), pytest.approx(0.0))
    assert ledger.totals(since=80_000.0)[0].requests == 2
    by = {name: {each.group: each.requests for each in ledger.totals(name)} for name in GROUPS}
    assert by == {
        "day": {"1970-01-01": 2, "1970-01-02": 2},
        "model": {"big": 2, "local": 1, "none": 1},
        "tier": {"cloud": 1, "local": 2, "none": 1},
        "key": {"": 2, "k": 2},
        "task": {"": 3, "sums": 1},
    }
    ledger.close()


def test_a_cost_that_nobody_knows_is_no_number(path: Path) -> None:
    ledger = Ledger(path)
    add_row(ledger, ROW)
    add_row(ledger, replace(ROW, id="b", cloud_model="unlisted", cost_usd=None, saved_usd=None))
    (total,) = ledger.totals()
    assert (total.cost_usd, total.unpriced, total.saved_usd) == (None, 1, 0.001)
    assert {each.group: each.cost_usd for each in ledger.totals("model")} == {"local": 0.0, "unlisted": None}
    row = ledger.get("b")
    assert row is not None and (row.cost_usd, row.saved_usd) == (None, None)
    ledger.close()


def test_pruning_takes_the_oldest_first_and_leaves_the_rest(path: Path) -> None:
    ledger = Ledger(path)
    for index in range(10):
        add_row(ledger, replace(ROW, id=str(index), started_at=float(index)))
    with closing(SqliteStore(path, REQUESTS)) as store:
        assert [store.prune(before, most) for before, most in ((0.0, 5), (6.0, 4), (6.0, 4), (6.0, 4))] == [0, 4, 2, 0]
    assert [row.id for row in ledger.rows()] == ["9", "8", "7", "6"]
    ledger.close()


def test_a_tier_alone(path: Path) -> None:
    ledger = Ledger(path)
    for index, tier in enumerate(("local", "cloud", "local")):
        add_row(ledger, replace(ROW, id=str(index), started_at=float(index), tier=tier))
    assert [row.id for row in ledger.rows(tier="local", limit=1)] == ["2"]
    ledger.close()


def of_format_1(path: Path) -> None:
    """A ledger with the row "old", as the first version wrote it."""
    path.parent.mkdir()
    with sqlite3.connect(path) as old:
        old.executescript("""
            CREATE TABLE requests (
              id TEXT PRIMARY KEY, ts REAL NOT NULL, model TEXT NOT NULL, route TEXT NOT NULL, tier TEXT NOT NULL,
              gate INTEGER NOT NULL, reason TEXT NOT NULL, p_gain REAL, threshold REAL,
              local_tokens INTEGER NOT NULL, cloud_tokens INTEGER NOT NULL,
              draft_proposed INTEGER NOT NULL, draft_accepted INTEGER NOT NULL,
              cost_usd REAL NOT NULL, saved_usd REAL NOT NULL, latency_ms REAL NOT NULL, status INTEGER NOT NULL
            ) STRICT;
            CREATE INDEX requests_ts ON requests (ts);
            PRAGMA user_version=1;
        """)
        old.execute(
            "INSERT INTO requests"
            " VALUES ('old', 0.5, 'auto', 'local', 'local', 3, 'r', 0.1, 0.5, 1, 0, 0, 0, 0, 0, 9, 200)"
        )
    old.close()


def test_ledger_of_the_first_format_still_works(path: Path) -> None:
    of_format_1(path)
    versions: list[int] = []

    def open_and_write(worker: int) -> None:
        ledger = Ledger(path)
        add_row(ledger, replace(ROW, id=f"new-{worker}", key="k", local_ms=1.5))
        versions.append(ledger.totals()[0].requests)
        ledger.close()

    threads = [threading.Thread(target=open_and_write, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(versions) == 9, "several openers at once, and none of them failed"
    ledger = Ledger(path)
    old_row, new_row = ledger.get("old"), ledger.get("new-3")
    assert old_row is not None and (old_row.latency_ms, old_row.decisions, old_row.local_ms) == (9, "[]", 0.0)
    assert new_row is not None and (new_row.key, new_row.local_ms) == ("k", 1.5)
    ledger.close()


def test_unusable_files(tmp_path: Path) -> None:
    foreign = tmp_path / "notes.txt"
    foreign.write_text("This is not a database, however long it may be. " * 100)
    with pytest.raises(ConfigurationError, match=r"Cannot use .* as the ledger"):
        Ledger(foreign)
    with pytest.raises(ConfigurationError, match=r"Cannot use .* as the ledger"):
        Ledger(tmp_path)
    newer = tmp_path / "newer.sqlite3"
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version=9")
    connection.close()
    with pytest.raises(ConfigurationError, match="format 9"):
        Ledger(newer)


@pytest.mark.parametrize("version", [0, 1, 3])
@pytest.mark.parametrize("read_only", [False, True])
def test_the_database_of_others_stays_as_it_is(path: Path, version: int, read_only: bool) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as theirs:
        theirs.executescript(f"CREATE TABLE requests (url); PRAGMA user_version={version};")
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="is not a ledger of Updraft"):
        Ledger(path, read_only=read_only)
    assert path.read_bytes() == before


def test_an_empty_file_becomes_a_ledger(path: Path) -> None:
    """A full disk, or a kill between the file and its tables, leaves one: no start may fail for it."""
    path.parent.mkdir()
    path.touch()
    with pytest.raises(StorageError, match="is empty"):
        Ledger(path, read_only=True)
    check_settings(RouterConfig(local=None, cloud_url="http://127.0.0.1:9/v1", cloud_model="m", ledger=path))
    with closing(Ledger(path)) as ledger:
        assert ledger.rows() == []


def test_an_older_ledger_is_read_as_it_is(path: Path) -> None:
    of_format_1(path)
    before = path.read_bytes()
    ledger = Ledger(path, read_only=True)
    (row,) = ledger.rows()
    assert ledger.get("old") == row
    assert (row.latency_ms, row.decisions, row.user) == (9, "[]", "")
    ledger.close()
    assert path.read_bytes() == before


def test_to_read_makes_no_file(path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Cannot use .* as the ledger"):
        Ledger(path, read_only=True)
    assert not path.parent.exists()


def test_pending_rows_are_read(path: Path) -> None:
    path = path.with_name("one?mode=rw&two#three.sqlite3")
    writer = Ledger(path)
    add_row(writer, ROW)
    with writer.transaction():
        reader = Ledger(path, read_only=True)
        assert reader.rows() == [ROW]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            add_row(reader, ROW)
        reader.close()
    writer.close()


def test_a_new_file_may_be_opened_by_many_at_once(tmp_path: Path) -> None:
    """SQLite refuses a second switch to a write-ahead log at once, whatever its timeout."""
    refused: list[Exception] = []

    def open_and_write(path: Path, start: threading.Barrier) -> None:
        start.wait()
        try:
            Ledger(path).close()
        except ConfigurationError as error:
            refused.append(error)

    for number in range(100):
        start = threading.Barrier(6)
        arguments = (tmp_path / f"{number}.sqlite3", start)
        threads = [threading.Thread(target=open_and_write, args=arguments) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not refused
