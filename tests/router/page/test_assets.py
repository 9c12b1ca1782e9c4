"""What the page is served as: open files under a strict policy, and data only for whoever has the key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cloud_fixture import cloud, cloud_server
from router_fakes import FakeCloud
from starlette.testclient import TestClient
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from updraft.router.server.page.assets import public_paths

__all__ = ["cloud", "cloud_server"]


@pytest.fixture
def http(cloud: FakeCloud, tmp_path: Path) -> Iterator[TestClient]:
    config = RouterConfig(local=None, cloud_url=cloud.url, cloud_model="big", ledger=tmp_path / "ledger.sqlite3")
    with TestClient(daemon_app(Router(config), "secret"), base_url="http://127.0.0.1") as client:
        yield client


def test_its_files_want_no_key_and_its_data_does(http: TestClient) -> None:
    assert len(public_paths()) > 8
    for path in public_paths():
        answer = http.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    for path in ("/updraft/status", "/updraft/requests", "/updraft/savings", "/page/nothing.js", "/page/../secrets.py"):
        assert http.get(path).status_code == 401, path
    assert http.get("/", headers={"host": "evil.example"}).status_code == 403


def test_what_is_asked_wrongly_is_refused_by_name(http: TestClient) -> None:
    http.headers["authorization"] = "Bearer secret"
    assert http.get("/page/..%2fassets.py").status_code == 404
    for path, param in (("/updraft/requests?limit=0", "limit"), ("/updraft/requests?tier=x", "tier"),
                        ("/updraft/savings?days=9999", "days"), ("/updraft/savings?day=1", "day")):  # fmt: skip
        assert http.get(path).json()["error"]["param"] == param
    assert http.post("/updraft/models/pull", json={"model": "/etc/passwd"}).status_code == 400
    assert http.post("/updraft/models/memory", json={"action": "sleep"}).json()["error"]["code"] == "invalid_value"
    assert http.get("/updraft/policy").status_code == 404
    assert http.get("/updraft/requests/none").status_code == 404
    assert http.post("/updraft/requests/none/feedback", json={"thumb": "up"}).status_code == 404


def test_a_trace_asks_no_cloud_and_writes_no_row(http: TestClient, cloud: FakeCloud) -> None:
    http.headers["authorization"] = "Bearer secret"
    body = {"model": "auto", "messages": [{"role": "user", "content": "hello"}]}
    assert http.post("/updraft/trace", json=body).json()["tier"] == "cloud"
    assert cloud.requests == []
    assert http.get("/updraft/requests").json() == {"requests": []}
    http.post("/v1/chat/completions", json=body)
    assert [row["tier"] for row in http.get("/updraft/requests").json()["requests"]] == ["cloud"]
    assert http.get("/updraft/savings").json()["total"]["requests"] == 1
