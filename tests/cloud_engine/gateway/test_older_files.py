"""Files of older gateways: usage rows are taken over, and keys by a command."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner
from updraft.accounting.ledger.store import SqliteStore
from updraft.cli.main import app
from updraft.cloud_engine.gateway.access.database import KeyDatabase, digest_of
from updraft.cloud_engine.gateway.ledger.metering import USAGE
from updraft.protocol.errors import ConfigurationError

BEFORE = (
    "CREATE TABLE usage (id INTEGER PRIMARY KEY, request_id TEXT, key_name TEXT, model TEXT, node TEXT, status INTEGER,"
    " prompt_tokens INTEGER, completion_tokens INTEGER, accepted_prediction_tokens INTEGER,"
    " rejected_prediction_tokens INTEGER, latency_ms REAL, ttft_ms REAL, retries INTEGER, bytes INTEGER,"
    " started_at REAL)"
)


def test_usage_rows_of_before_are_taken_over(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite3"
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(BEFORE)
        for number in range(3):
            values = (f"r{number}", "team-a", "big", "node", 200, 7, 5, 1, 2, 12.5, None, 0, 90, 1700000000.0 + number)
            connection.execute(f"INSERT INTO usage VALUES (NULL, {', '.join('?' * 14)})", values)
    for _ in range(2):  # again finds the new format
        SqliteStore(file, USAGE).close()
    with closing(sqlite3.connect(file)) as connection:
        rows = connection.execute(f"SELECT {', '.join(USAGE.columns)} FROM usage ORDER BY started_at").fetchall()
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    reading = [dict(zip(USAGE.columns, row, strict=True)) for row in rows]
    assert [row["request_id"] for row in reading] == ["r0", "r1", "r2"]
    assert {(row["state"], row["tenant"], row["key_id"], row["completion_tokens"]) for row in reading} == {
        ("settled", "team-a", "team-a", 5)
    }
    assert len({row["id"] for row in reading}) == 3
    assert "usage_before" not in tables


def test_a_table_of_somebody_else_stays(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite3"
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("CREATE TABLE usage (id INTEGER PRIMARY KEY, hours REAL)")
    with pytest.raises(ConfigurationError, match="is not a usage database of Updraft"):
        SqliteStore(file, USAGE)
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT hours FROM usage").fetchall() == []


@pytest.mark.parametrize("form", ["lines", "json"])
def test_keys_of_a_key_file_still_work(tmp_path: Path, form: str) -> None:
    digests = {name: hashlib.sha256(f"updraft-{name}".encode()).hexdigest() for name in ("team-a", "team-b")}
    lines = "# keys\n\n" + "".join(f"{name}:{digest}\n" for name, digest in digests.items())
    old, new = tmp_path / "keys.txt", tmp_path / "keys.sqlite3"
    old.write_text(lines if form == "lines" else json.dumps(digests))
    done = CliRunner().invoke(app, ["keys", "import", str(old), "--keys", str(new)])
    assert done.exit_code == 0, done.output
    records = KeyDatabase(new).keys()
    assert [record.principal.name for record in records] == ["team-a", "team-b"]
    with closing(sqlite3.connect(new)) as connection:
        kept = {digest for (digest,) in connection.execute("SELECT digest FROM digests")}
    assert kept == {digest_of("updraft-team-a"), digest_of("updraft-team-b")}
    with pytest.raises(ConfigurationError, match="already"):
        KeyDatabase(new).take_over(lines, "test")


def test_a_bad_line_takes_over_nothing_and_is_not_shown(tmp_path: Path) -> None:
    database = KeyDatabase(tmp_path / "keys.sqlite3")
    with pytest.raises(ConfigurationError, match="Line 2") as caught:
        database.take_over(f"team-a:{'0' * 64}\nupdraft-a-bare-key", "test")
    assert "bare" not in caught.value.message
    assert database.keys() == []


def test_a_key_file_is_no_database_and_the_error_names_the_command(tmp_path: Path) -> None:
    old = tmp_path / "keys.txt"
    old.write_text(f"team-a:{'0' * 64}\n" * 20)
    with pytest.raises(ConfigurationError, match="updraft keys import"):
        KeyDatabase.existing(old)


def test_a_repeated_name_in_a_key_file_imports_nothing(tmp_path: Path) -> None:
    database = KeyDatabase(tmp_path / "keys")
    for digests in (("0", "1"), ("0", "0")):
        pairs = ", ".join(f'"team-a": "{digest * 64}"' for digest in digests)
        with pytest.raises(ConfigurationError, match="'team-a' already exists"):
            database.take_over(f"{{{pairs}}}", "test")
    assert database.keys() == []
