"""`updraft top`: rates between two reads, a read of a real gateway, and a clear error without a gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_keys import make_key
from server_processes import FAKE_NODE, running
from updraft.cli.top import Scrape, facts

BEFORE = """
# TYPE updraft_gateway_requests_total counter
updraft_gateway_requests_total{status="200"} 10.0
# TYPE updraft_gateway_ttft_seconds histogram
updraft_gateway_ttft_seconds_count{model="m",tier="batch"} 4.0
updraft_gateway_ttft_seconds_sum{model="m",tier="batch"} 400.0
"""
NOW = """
# TYPE updraft_gateway_requests_total counter
updraft_gateway_requests_total{status="200"} 16.0
updraft_gateway_requests_total{status="429"} 4.0
# TYPE updraft_gateway_ttft_seconds histogram
updraft_gateway_ttft_seconds_count{model="m",tier="batch"} 8.0
updraft_gateway_ttft_seconds_sum{model="m",tier="batch"} 402.0
# TYPE updraft_gateway_node_breaker_trips_total counter
updraft_gateway_node_breaker_trips_total{node="http://a"} 3.0
"""


def test_rates_and_means_are_of_the_time_between_two_looks() -> None:
    rates = facts(Scrape.of(NOW, 12.0), Scrape.of(BEFORE, 10.0), [{"url": "http://a"}, {"url": "http://b"}])
    assert rates["requests_per_s"] == 5.0
    assert rates["mean_ttft_s"] == 0.5
    assert rates["slo_share"] is None
    assert [node["breaker_trips"] for node in rates["nodes"]] == [3, 0]


def test_one_look_at_a_gateway(updraft: Any, tmp_path: Path) -> None:
    key = make_key(tmp_path / "keys", "operator", "inference", "usage", "admin")
    weak = make_key(tmp_path / "keys", "app", "inference")
    command = [
        "-m",
        "updraft",
        "gateway",
        "--port",
        "0",
        "--keys",
        str(tmp_path / "keys"),
        "--ledger",
        str(tmp_path / "db"),
    ]
    with running(str(FAKE_NODE)) as node, running(*command, "--node", node.url) as gateway:
        body = {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers).status_code == 200
        done = updraft("top", gateway.url, "--api-key-env", "KEY", "--once", "--json", env={"KEY": key})
        shown = updraft("top", gateway.url, "--api-key-env", "KEY", "--once", env={"KEY": key})
        refused = updraft("top", gateway.url, "--api-key-env", "KEY", "--once", env={"KEY": weak})
    figures = json.loads(done.stdout)
    assert figures["requests_per_s"] is None
    assert figures["mean_ttft_s"] > 0
    assert figures["nodes"] == [
        {"url": node.url, "healthy": True, "reason": "", "models": ["echo"], "in_flight": 0, "breaker_trips": 0}
    ]
    assert node.url in shown.stdout
    assert refused.returncode == 2
    assert "scopes usage and admin" in refused.stderr


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "no address"])
def test_missing_gateway_is_reported(updraft: Any, url: str) -> None:
    done = updraft("top", url, "--once")
    assert done.returncode == 1
    assert "No gateway answers" in done.stderr
    assert "Traceback" not in done.stderr
