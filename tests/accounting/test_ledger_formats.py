"""Files and records of older formats: migrated without loss, read as they are, and refused where they are not ours."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from updraft.accounting.ledger.intents import IntentFile
from updraft.accounting.ledger.store import SqliteStore
from updraft.accounting.ledger.table import BookedRow, LedgerTable, Table
from updraft.cloud_engine.gateway.ledger.metering import USAGE
from updraft.cloud_engine.gateway.ledger.opening import open_reader, open_store
from updraft.protocol.errors import ConfigurationError, StorageError
from updraft.router.accounting.ledger import REQUESTS, Ledger

# What made the router's formats 1 to 5, each out of the one before.
STEPS = (
    (
        """CREATE TABLE requests (
          id TEXT PRIMARY KEY, ts REAL NOT NULL, model TEXT NOT NULL, route TEXT NOT NULL, tier TEXT NOT NULL,
          gate INTEGER NOT NULL, reason TEXT NOT NULL, p_gain REAL, threshold REAL,
          local_tokens INTEGER NOT NULL, cloud_tokens INTEGER NOT NULL,
          draft_proposed INTEGER NOT NULL, draft_accepted INTEGER NOT NULL,
          cost_usd REAL NOT NULL, saved_usd REAL NOT NULL, latency_ms REAL NOT NULL, status INTEGER NOT NULL
        ) STRICT""",
        "CREATE INDEX requests_ts ON requests (ts)",
        "INSERT INTO requests"
        " VALUES ('a', 86400.5, 'm', 'cloud', 'cloud', 3, 'r', 0.1, NULL, 4, 5, 6, 7, 0.5, 0.25, 9, 200)",
    ),
    (
        "ALTER TABLE requests ADD COLUMN key TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE requests ADD COLUMN cloud_model TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE requests ADD COLUMN failure TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE requests ADD COLUMN decisions TEXT NOT NULL DEFAULT '[]'",
        "ALTER TABLE requests ADD COLUMN local_prompt_tokens INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE requests ADD COLUMN cloud_prompt_tokens INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE requests ADD COLUMN local_ms REAL NOT NULL DEFAULT 0",
        "ALTER TABLE requests ADD COLUMN cloud_ms REAL NOT NULL DEFAULT 0",
        "UPDATE requests SET key = 'k', cloud_model = 'big', failure = 'f', decisions = '[1]',"
        " local_prompt_tokens = 11, cloud_prompt_tokens = 12, local_ms = 13, cloud_ms = 14",
    ),
    (
        "ALTER TABLE requests ADD COLUMN user TEXT NOT NULL DEFAULT ''",
        "CREATE INDEX requests_caller ON requests (key, user, ts)",
        """CREATE TABLE spending (
          day INTEGER NOT NULL, scope TEXT NOT NULL, requests INTEGER NOT NULL, cloud_requests INTEGER NOT NULL,
          cloud_tokens INTEGER NOT NULL, usd REAL NOT NULL, PRIMARY KEY (day, scope)
        ) STRICT, WITHOUT ROWID""",
        "UPDATE requests SET user = 'u'",
        "INSERT INTO spending VALUES (1, 'all', 2, 3, 4, 5.5)",
    ),
    (
        "ALTER TABLE requests RENAME COLUMN cost_usd TO known_cost_usd",
        "ALTER TABLE requests ADD COLUMN cost_usd REAL",
        "UPDATE requests SET cost_usd = known_cost_usd",
        "ALTER TABLE requests DROP COLUMN known_cost_usd",
        "ALTER TABLE requests RENAME COLUMN saved_usd TO known_saved_usd",
        "ALTER TABLE requests ADD COLUMN saved_usd REAL",
        "UPDATE requests SET saved_usd = NULL",
        "ALTER TABLE requests DROP COLUMN known_saved_usd",
        "ALTER TABLE spending RENAME TO spending_of_days",
        """CREATE TABLE spending (
          period TEXT NOT NULL, day INTEGER NOT NULL, scope TEXT NOT NULL, requests INTEGER NOT NULL,
          cloud_requests INTEGER NOT NULL, cloud_tokens INTEGER NOT NULL, usd REAL NOT NULL,
          PRIMARY KEY (period, day, scope)
        ) STRICT, WITHOUT ROWID""",
        "INSERT INTO spending SELECT 'day', * FROM spending_of_days",
        "DROP TABLE spending_of_days",
        "INSERT INTO spending VALUES ('month', 0, 'all', 2, 3, 4, 5.5)",
    ),
    (
        "ALTER TABLE requests ADD COLUMN feedback INTEGER NOT NULL DEFAULT 0",
        "UPDATE requests SET feedback = -1",
    ),
)
# The row of these files, format by format.
FACTS: tuple[dict[str, Any], ...] = (
    {
        **{"id": "a", "started_at": 86400.5, "model": "m", "route": "cloud", "tier": "cloud", "gate": 3, "reason": "r"},
        **{"p_gain": 0.1, "threshold": None, "local_tokens": 4, "cloud_tokens": 5, "draft_proposed": 6},
        **{"draft_accepted": 7, "cost_usd": 0.5, "saved_usd": 0.25, "latency_ms": 9.0, "status": 200},
        **{"cached_tokens": 0, "key": "", "cloud_model": "", "failure": "", "decisions": "[]"},
        **{"local_prompt_tokens": 0, "cloud_prompt_tokens": 0, "local_ms": 0.0, "cloud_ms": 0.0},
        **{"user": "", "feedback": 0, "task": ""},
    },
    {
        **{"key": "k", "cloud_model": "big", "failure": "f", "decisions": "[1]", "local_prompt_tokens": 11},
        **{"cloud_prompt_tokens": 12, "local_ms": 13.0, "cloud_ms": 14.0},
    },
    {"user": "u"},
    {"saved_usd": None},
    {"feedback": -1},
)
SPENDING = {
    3: [("day", 1, "all", 2, 3, 4, 5.5)],
    4: [("day", 1, "all", 2, 3, 4, 5.5), ("month", 0, "all", 2, 3, 4, 5.5)],
}
# The gateway's table before its files had a format number.
USAGE_BEFORE = (
    "CREATE TABLE usage (request_id TEXT, key_name TEXT, model TEXT, node TEXT, status INTEGER, prompt_tokens INTEGER,"
    " completion_tokens INTEGER, accepted_prediction_tokens INTEGER, rejected_prediction_tokens INTEGER,"
    " latency_ms REAL, ttft_ms REAL, retries INTEGER, bytes INTEGER, started_at REAL, cached_tokens INTEGER,"
    " cost_usd REAL, tier TEXT, key_id TEXT, tenant TEXT, worker TEXT, state TEXT, id TEXT, PRIMARY KEY (id))"
)
USAGE_VALUES = ("r", "team", "m", "n", 200, 1, 2, 3, 4, 5.0, None, 6, 7, 86400.5, 8, 0.5, "batch", "k", "t", "w")
USAGE_FACTS = {
    **{"request_id": "r", "key_name": "team", "model": "m", "node": "n", "status": 200, "prompt_tokens": 1},
    **{"completion_tokens": 2, "accepted_prediction_tokens": 3, "rejected_prediction_tokens": 4, "latency_ms": 5.0},
    **{"ttft_ms": None, "retries": 6, "bytes": 7, "started_at": 86400.5, "cached_tokens": 8, "cost_usd": 0.5},
    **{"tier": "batch", "key_id": "k", "tenant": "t", "worker": "w", "state": "settled", "id": "x"},
}


def of_router(path: Path, file_format: int) -> dict[str, Any]:
    """Make a file of the format. Returns its row as this format has it."""
    facts: dict[str, Any] = {}
    with closing(sqlite3.connect(path)) as connection, connection:
        for step, more in list(zip(STEPS, FACTS, strict=True))[:file_format]:
            facts |= more
            for statement in step:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version={file_format}")
    return facts


def of_gateway(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(USAGE_BEFORE)
        connection.execute("CREATE TABLE usage_schema (version INTEGER NOT NULL)")
        connection.execute("INSERT INTO usage_schema VALUES (1)")
        connection.execute(f"INSERT INTO usage VALUES ({', '.join('?' * 22)})", (*USAGE_VALUES, "settled", "x"))


def selected(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite3"


@pytest.mark.parametrize("file_format", [1, 2, 3, 4, 5])
def test_every_older_ledger_is_read_as_it_is_and_migrated_without_loss(path: Path, file_format: int) -> None:
    facts = of_router(path, file_format)
    before = path.read_bytes()
    with closing(Ledger(path, read_only=True)) as ledger:
        assert [asdict(row) for row in ledger.rows()] == [facts]
        totals = ledger.totals("day"), ledger.totals("model"), ledger.totals()
    assert path.read_bytes() == before
    for _ in range(2):  # the second finds this format
        with closing(Ledger(path)) as ledger:
            assert [asdict(row) for row in ledger.rows()] == [facts]
            assert (ledger.totals("day"), ledger.totals("model"), ledger.totals()) == totals
    assert selected(path, "SELECT * FROM spending") == SPENDING.get(min(file_format, 4), [])
    assert selected(path, "SELECT ts FROM requests") == [(86400.5,)], "the former name"
    Ledger(path.with_name("new.sqlite3")).close()
    schema = "SELECT name, sql FROM sqlite_schema WHERE tbl_name = 'requests' ORDER BY name"
    assert selected(path, schema) == selected(path.with_name("new.sqlite3"), schema)
    assert selected(path, "PRAGMA user_version") == [(7,)]


def test_a_ledger_without_tasks_gets_the_column(path: Path) -> None:
    """Format 6, and a row that its process left."""
    names = tuple(name for name in REQUESTS.columns if name != "task")
    values = tuple(ROUTER_FACTS[name] for name in names)
    with closing(Ledger(path)) as ledger, ledger.transaction() as connection:
        connection.execute("ALTER TABLE requests DROP COLUMN task")
        connection.execute(f"INSERT INTO requests ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})", values)
        connection.execute("PRAGMA user_version = 6")
    folder = path.with_name(f"{path.name}.workers")
    folder.mkdir(exist_ok=True)
    with closing(IntentFile(folder / "intents-3", REQUESTS.places, REQUESTS.place_bytes)) as left:
        left.add(json.dumps([6, ("left", *values[1:])]).encode())
    with closing(SqliteStore(path, REQUESTS)) as store:
        for rows in store.orphaned_rows():
            store.write([], rows)
    with closing(Ledger(path)) as ledger:
        rows = {row.id: asdict(row) for row in ledger.rows()}
    assert rows == {"a": ROUTER_FACTS, "left": {**ROUTER_FACTS, "id": "left"}}


def test_a_migration_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, create = of_router(path, 3), Table.create
    before = selected(path, "SELECT * FROM sqlite_schema"), selected(path, "SELECT * FROM requests")
    with monkeypatch.context() as patched:
        patched.setattr(Table, "create", lambda table: [*create(table), "NO SQL"])
        with pytest.raises(StorageError, match="as the ledger"):
            Ledger(path)
    assert (selected(path, "SELECT * FROM sqlite_schema"), selected(path, "SELECT * FROM requests")) == before
    with closing(Ledger(path)) as ledger:
        assert [asdict(row) for row in ledger.rows()] == [facts]


def test_a_gateways_file_without_a_number_gets_one_and_keeps_its_table(path: Path) -> None:
    of_gateway(path)
    before = path.read_bytes()
    with open_reader(path).rows() as rows:
        assert list(rows) == [USAGE_FACTS]
    assert path.read_bytes() == before
    schema = selected(path, "SELECT sql FROM sqlite_schema WHERE name = 'usage'")
    for _ in range(2):
        open_store(path).close()
        with open_reader(path).rows() as rows:
            assert list(rows) == [USAGE_FACTS]
    assert selected(path, "SELECT sql FROM sqlite_schema WHERE name = 'usage'") == schema, "no row was copied"
    assert selected(path, "PRAGMA user_version") == [(1,)]


def test_the_first_gateways_rows_are_read_without_a_migration(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        names = USAGE_BEFORE.partition("(")[2].split(", cached_tokens")[0]
        connection.execute(f"CREATE TABLE usage (id INTEGER PRIMARY KEY, {names})")
        connection.execute(f"INSERT INTO usage VALUES (7, {', '.join('?' * 14)})", USAGE_VALUES[:14])
    before = path.read_bytes()
    later = {"cached_tokens": 0, "cost_usd": None, "tier": "interactive", "key_id": "team", "tenant": "team"}
    with open_reader(path).rows() as rows:
        assert list(rows) == [{**USAGE_FACTS, **later, "worker": "", "id": "before-0000000000000007"}]
    (total,) = open_reader(path).totals(["day"])
    assert (total["day"], total["requests"], total["unpriced"]) == ("1970-01-02", 1, 1)
    assert path.read_bytes() == before


def read(path: Path) -> object:
    return open_reader(path).totals(["key"])


@pytest.mark.parametrize("use", [open_store, read])
def test_a_gateway_takes_no_file_of_others(path: Path, use: Callable[[Path], object]) -> None:
    of_router(path, 1)
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="is not a usage database of Updraft"):
        use(path)
    assert path.read_bytes() == before
    newer = path.with_name("newer.sqlite3")
    with closing(sqlite3.connect(newer)) as connection:
        connection.execute("PRAGMA user_version=2")
    with pytest.raises(ConfigurationError, match=r"has format 2, but this version supports up to 1"):
        use(newer)
    damaged = path.with_name("damaged.sqlite3")
    damaged.write_bytes(b"This is not a database. " * 100)
    with pytest.raises(StorageError, match="as the usage database"):
        use(damaged)


def test_reading_makes_no_file(path: Path) -> None:
    with pytest.raises(StorageError, match="as the usage database"):
        read(path)
    assert not path.exists()
    path.touch()
    with pytest.raises(StorageError, match="is empty"):
        read(path)


ROUTER_RECORD = (
    *("a", 86400.5, "m", "cloud", "cloud", 3, "r", 0.1, None, 4, 5, 6, 7, 0.5, None, 9.0, 200, "k", "big", "f", "[1]"),
    *(11, 12, 13.0, 14.0, "u", -1),
)
ROUTER_FACTS = {name: value for facts in FACTS for name, value in facts.items()}


@pytest.mark.parametrize(
    ("table", "record", "facts"),
    [(REQUESTS, ROUTER_RECORD, ROUTER_FACTS), (USAGE, (*USAGE_VALUES, "settled", "x"), USAGE_FACTS)],
    ids=["router", "gateway"],
)
def test_rows_that_an_older_process_left_are_committed(
    path: Path, table: LedgerTable, record: tuple[Any, ...], facts: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its records hold values alone, in the order of its columns."""
    with closing(SqliteStore(path, table)) as store:
        folder = path.with_name(f"{path.name}.workers")
        with closing(IntentFile(folder / "intents-3", table.places, table.place_bytes)) as left:
            left.add(json.dumps(record).encode())
            left.add(json.dumps([table.format + 1, record]).encode())
            left.add(json.dumps([table.format, record[1:]]).encode())
            left.add(json.dumps(7).encode())
        with caplog.at_level(logging.ERROR):
            for rows in store.orphaned_rows():
                store.write([], rows)
    assert [record.message.count("damaged") for record in caplog.records] == [1, 1, 1]
    (row,) = selected(path, f"SELECT {', '.join(table.columns)} FROM {table.name}")
    assert dict(zip(table.columns, row, strict=True)) == facts


@pytest.mark.parametrize("table", [REQUESTS, USAGE], ids=["router", "gateway"])
def test_a_record_comes_back_as_it_went_in(table: LedgerTable) -> None:
    values = tuple(f"value {number}" for number in range(len(table.columns)))
    row = BookedRow(values, ((1, 0.1, "all"),))
    assert table.row_in(table.record_of(row)) == row


def test_a_record_without_bookings_is_read() -> None:
    values = tuple(f"value {number}" for number in range(len(REQUESTS.columns)))
    assert REQUESTS.row_in(json.dumps([REQUESTS.format, values]).encode()) == BookedRow(values)


def test_a_url_of_another_database_is_refused_by_its_option() -> None:
    for option in ("gateway", "ledger"):
        with pytest.raises(ConfigurationError, match=f"--{option} must be a file") as caught:
            open_reader("mysql://host/usage", option)
        assert caught.value.param == option


@pytest.mark.parametrize("use", [open_store, open_reader])
def test_a_url_of_another_database_makes_no_folder(
    use: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="postgresql") as caught:
        use("mysql://user:canary@host/usage")
    assert "canary" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_link_shares_the_journal_of_the_file(path: Path) -> None:
    link = path.parent / "links" / "ledger.sqlite3"
    link.parent.mkdir()
    link.symlink_to(path)
    with closing(SqliteStore(path, REQUESTS)) as store, closing(SqliteStore(link, REQUESTS)) as linked:
        assert store.intents is not None
        store.intents.add(b"of a live process")
        assert [*linked.orphaned_rows()] == []
    assert list(link.parent.iterdir()) == [link]
