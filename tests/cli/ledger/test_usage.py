"""`updraft usage` and `updraft log`: what a ledger adds up to, and its latest requests."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_rows import add_row
from typer.testing import CliRunner
from updraft.cli.main import app
from updraft.protocol.errors import ConfigurationError, InvalidRequestError, StorageError
from updraft.router.accounting.ledger import Ledger
from updraft.router.accounting.prices import Prices
from updraft.router.accounting.request_record import RequestRecord

DAY_S = 86_400


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """A local answer of today, an escalated one of yesterday with a price, and an unpriced one of last year."""
    path, now = tmp_path / "ledger.sqlite3", time.time()
    row = replace(RequestRecord(Prices(), "big").row(200), model="auto", key="0123", reason="fits [on] the device")
    local = replace(row, id="local", started_at=now, route="local", tier="local", local_prompt_tokens=7, local_tokens=6)
    cloud = replace(row, id="cloud", started_at=now - DAY_S, route="escalated", tier="cloud", cloud_model="big", key="")
    with_price = replace(cloud, cloud_prompt_tokens=1000, cloud_tokens=234, cost_usd=0.25, saved_usd=-0.05)
    written = Ledger(path)
    for each in (
        replace(local, cost_usd=0.0, saved_usd=0.125),
        with_price,
        replace(cloud, id="old", started_at=now - 365 * DAY_S, cloud_model="new\x1b[2J", cost_usd=None, saved_usd=None),
    ):
        add_row(written, each)
    written.close()
    return path


def said(*arguments: str, ledger: Path) -> str:
    result = CliRunner().invoke(app, [*arguments, "--ledger", str(ledger)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_usage_adds_up(ledger: Path) -> None:
    usage = json.loads(said("usage", "--json", "--since", "30d", ledger=ledger))
    total = usage["total"]
    assert (total["requests"], total["stayed_local"], total["local_share"]) == (2, 1, 0.5)
    assert (total["local_tokens"], total["cloud_tokens"]) == (13, 1234)
    assert (total["cost_usd"], total["unpriced"]) == (0.25, 0)
    assert total["saved_usd"] == pytest.approx(0.075)
    assert {each["group"]: each["cost_usd"] for each in usage["model"]} == {"big": 0.25, "local": 0.0}
    assert {each["group"]: each["requests"] for each in usage["tier"]} == {"cloud": 1, "local": 1}
    assert {each["group"] for each in usage["key"]} == {"", "0123"}
    assert len(usage["day"]) == 2


def test_cost_of_an_unpriced_model_is_unknown(ledger: Path) -> None:
    usage = json.loads(said("usage", "--json", ledger=ledger))
    assert (usage["total"]["cost_usd"], usage["total"]["unpriced"]) == (None, 1)
    text = said("usage", "--by", "model", ledger=ledger)
    assert "$0.2500" in text and "50%" not in text and "33%" in text
    assert "unknown" in text and '[prices.models."NAME"]' in text
    assert "new\ufffd[2J" in text, "a name commands no terminal"


@pytest.mark.parametrize(("since", "requests"), [("90m", 1), ("2w", 2), ("2000-01-01", 3)])
def test_since_when(ledger: Path, since: str, requests: int) -> None:
    assert json.loads(said("usage", "--json", "--since", since, ledger=ledger))["total"]["requests"] == requests


def test_invalid_times_are_refused(ledger: Path) -> None:
    result = CliRunner().invoke(app, ["usage", "--since", "yesterday", "--ledger", str(ledger)])
    assert isinstance(result.exception, InvalidRequestError)
    assert "7d" in result.exception.message


def test_log_lists_the_newest(ledger: Path) -> None:
    text = said("log", ledger=ledger)
    assert text.index("new\ufffd[2J") < text.index("big") < text.index("fits [on] the device", text.index("$0.250000"))
    assert "cloud (escalated)" in text and "1,234" in text
    newest = json.loads(said("log", "--json", "-n", "2", ledger=ledger))
    assert [row["id"] for row in newest] == ["local", "cloud"]
    assert all(row["ts"] == row["started_at"] for row in newest), "the former name stays"
    assert [row["id"] for row in json.loads(said("log", "--json", "--tier", "cloud", ledger=ledger))] == [
        "cloud",
        "old",
    ]


def test_an_empty_ledger_has_totals_and_a_missing_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    for command in ("usage", "log"):
        result = CliRunner().invoke(app, [command, "--ledger", str(path)])
        assert isinstance(result.exception, InvalidRequestError)
    Ledger(path).close()
    assert "total" in said("usage", ledger=path)
    assert json.loads(said("log", "--json", ledger=path)) == []


@pytest.mark.parametrize("command", ["usage", "log", "why"])
def test_a_damaged_ledger_is_named_with_what_to_do(ledger: Path, command: str) -> None:
    content = ledger.read_bytes()
    ledger.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    result = CliRunner().invoke(app, [command, "--ledger", str(ledger)])
    assert isinstance(result.exception, StorageError)
    assert f"The ledger {ledger} is damaged" in str(result.exception)


def test_the_price_that_a_budget_needs_is_named_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    settings = {"UPDRAFT_CLOUD_URL": "http://127.0.0.1:9", "UPDRAFT_CLOUD_MODEL": "new", "UPDRAFT_BUDGET_USD": "5"}
    result = CliRunner().invoke(app, ["serve", "--local", "none", "--port", "0"], env=settings)
    assert isinstance(result.exception, ConfigurationError)
    assert "'new' has no price" in result.exception.message
    assert '[prices.models."new"]' in result.exception.message
