"""`updraft why`: a request explained in words, from a ledger that a router wrote."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from ledger_rows import add_row
from typer.testing import CliRunner
from updraft.accounting.reported_usage import ReportedUsage
from updraft.cli.main import app
from updraft.protocol.errors import ConfigurationError, InvalidRequestError, NotFoundError
from updraft.router.accounting.ledger import Ledger
from updraft.router.accounting.prices import Prices
from updraft.router.accounting.request_record import CloudCall, RequestRecord
from updraft.router.gates.gates import GateDecision
from updraft.router.request.chat_request import Caller


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    record = RequestRecord(
        Prices(cloud_input=0.5, cloud_output=1.5), "big", "chatcmpl-1", "auto", Caller("0123456789abcdef")
    )
    record.decide(GateDecision(0, escalate=False, reason="both tiers may answer"))
    record.judged(GateDecision(2, escalate=False, reason="going well", p_gain=0.1, threshold=0.5))
    record.judged(GateDecision(2, escalate=False, reason="still going well", p_gain=0.2, threshold=0.5))
    record.decide(GateDecision(3, escalate=True, reason="not good [enough]", p_gain=0.9, threshold=0.5))
    record.route = "escalated"
    record.cloud_calls.append(CloudCall("big", counted=ReportedUsage(11, 4, 2, 4)))
    record.local_s, record.cloud_s = 0.25, 0.5
    path = tmp_path / "ledger.sqlite3"
    written = Ledger(path)
    add_row(written, record.row(200))
    written.close()
    return path


def test_why_names_tier_reason_and_cost(ledger: Path) -> None:
    for call in (["why", "chatcmpl-1"], ["why"]):
        printed = CliRunner().invoke(app, [*call, "--ledger", str(ledger)], env={"COLUMNS": "200"}).output
        assert "by the cloud" in printed
        assert "not good [enough]" in printed
        assert "gate 2 during: device: still going well [P(gain) 0.200, threshold 0.500]" in printed
        assert ": going well" not in printed, "of a gate that looks again and again, the last word"
        assert "device 250 ms, cloud 500 ms" in printed
        assert "2 of 6 draft tokens accepted" in printed
        assert "$0.000012" in printed
    row = json.loads(CliRunner().invoke(app, ["why", "--json", "--ledger", str(ledger)]).output)
    assert [each["gate"] for each in row["decisions"]] == [0, 2, 3]


def test_control_characters_of_callers_are_escaped(tmp_path: Path) -> None:
    record = RequestRecord(Prices(), "big", "chatcmpl-1", "\x1b[2J\x1b]0;mine\x07evil\u202e" + "m" * 5000)
    record.decide(GateDecision(0, escalate=True, reason="unknown \x9b2J`\nanswered  by the device" + "x" * 5000))
    path = tmp_path / "ledger.sqlite3"
    written = Ledger(path)
    add_row(written, record.row(404))
    row = next(iter(written.rows()))
    written.close()
    assert (len(row.model), len(row.reason), len(row.decisions) < 1000) == (100, 500, True)
    printed = CliRunner().invoke(app, ["why", "--ledger", str(path)], env={"COLUMNS": "2000"}).output
    assert "\ufffd[2J\ufffd]0;mine\ufffdevil\ufffdmmm" in printed
    assert "unknown \ufffd2J`\ufffdanswered  by the device" in printed
    assert all(character.isprintable() for character in printed.replace("\n", ""))


def test_missing_rows_and_ledgers(ledger: Path, tmp_path: Path) -> None:
    assert isinstance(CliRunner().invoke(app, ["why", "nobody", "--ledger", str(ledger)]).exception, NotFoundError)
    missing = tmp_path / "none.sqlite3"
    result = CliRunner().invoke(app, ["why", "--ledger", str(missing)])
    assert isinstance(result.exception, InvalidRequestError)
    assert not missing.exists(), "asking makes no ledger"


def test_asking_writes_nothing(ledger: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(ledger)) as older:
        older.executescript(
            "ALTER TABLE requests DROP COLUMN local_ms; PRAGMA user_version=1; PRAGMA journal_mode=DELETE"
        )
    theirs = tmp_path / "theirs.sqlite3"
    with closing(sqlite3.connect(theirs)) as connection:
        connection.execute("CREATE TABLE notes (text)")
    before = ledger.read_bytes(), theirs.read_bytes()
    assert CliRunner().invoke(app, ["why", "chatcmpl-1", "--ledger", str(ledger)]).exit_code == 0
    refused = CliRunner().invoke(app, ["why", "--ledger", str(theirs)]).exception
    assert isinstance(refused, ConfigurationError)
    assert refused.message == f"{theirs} is not a ledger of Updraft: name another file."
    assert (ledger.read_bytes(), theirs.read_bytes()) == before
