"""Limits that cannot work are reported at start, and requests name a limits store that cannot be reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from starlette.testclient import TestClient
from updraft.cloud_engine.gateway.limits.accounting import AccountingOptions, check_accounting
from updraft.cloud_engine.gateway.process import GatewayOptions, open_gateway
from updraft.protocol.errors import ConfigurationError

HELLO = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}


def options(tmp_path: Path, limits: str, models: str, **more: Any) -> AccountingOptions:
    (tmp_path / "limits.toml").write_text(limits)
    price = "input = 1\noutput = 1\n"
    (tmp_path / "prices.toml").write_text("".join(f"[prices.models.{name}]\n{price}" for name in models.split()))
    prices = str(tmp_path / "prices.toml") if models else None
    return AccountingOptions(str(tmp_path / "usage"), prices=prices, limits=tmp_path / "limits.toml", **more)


@pytest.mark.parametrize(
    ("limits", "models", "budget"),
    [
        ("[tenants.acme]\nusd_per_day = 1", "", "tenants.acme"),
        ("[models.big]\nusd_per_month = 1", "", "models.big"),
        ("[models.big]\nusd_per_day = 1", "small", "models.big"),
    ],
)
def test_a_budget_that_no_price_can_serve_is_refused(tmp_path: Path, limits: str, models: str, budget: str) -> None:
    with pytest.raises(ConfigurationError, match=f"budget of {budget} in .*limits.toml needs a price.*--prices"):
        check_accounting(options(tmp_path, limits, models))


@pytest.mark.parametrize("owner", ["tenants.acme", "models.big"])
def test_a_budget_whose_price_begins_later_is_refused(tmp_path: Path, owner: str) -> None:
    accounting = options(tmp_path, f"[{owner}]\nusd_per_day = 1", "big")
    price = '[[prices]]\nmodel = "big"\ninput = 1\noutput = 1\nfrom = 2999-01-01\n'
    Path(str(accounting.prices)).write_text(price)
    with pytest.raises(ConfigurationError, match="needs a price"):
        check_accounting(accounting)


def test_limits_without_a_use_for_the_served_models_are_logged(
    tmp_path: Path, fake_node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    limits = "[models.typo]\nmax_concurrency = 1\n[models.echo]\nmax_concurrency = 9\n[tenants.acme]\nusd_per_day = 1"
    gateway = GatewayOptions([fake_node.url], options(tmp_path, limits, "other"), no_auth=True)
    with TestClient(open_gateway(gateway)):
        logged = [each.getMessage() for each in caplog.records if "--limits" in each.getMessage()]
    assert logged == [
        "--limits: no node serves the model typo, so its limits never apply.",
        "--limits: every request of acme is refused: no price for echo.",
    ]


def test_an_unreachable_limits_store_is_named(tmp_path: Path, fake_node: Any, caplog: pytest.LogCaptureFixture) -> None:
    limits, url = "[tenants.anonymous]\nmax_concurrency = 9", f"redis://127.0.0.1:{free_port()}"
    gateway = GatewayOptions([fake_node.url], options(tmp_path, limits, "", limits_url=url), no_auth=True)
    with TestClient(open_gateway(gateway), base_url="http://127.0.0.1") as client:
        answers = [client.post("/v1/chat/completions", json=HELLO) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [503, 503]
    error = answers[0].json()["error"]
    assert error["code"] == "limits_unavailable"
    assert "cannot reach its limits store (--limits-url)" in error["message"]
    assert len([each for each in caplog.records if "Cannot reach the Redis server" in each.getMessage()]) == 1
