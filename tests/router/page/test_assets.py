"""The page's service: open files under a strict policy, and data only for whoever has the key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from browser import KEY, page_daemon
from cloud_fixture import cloud, cloud_server
from homes import home_in
from router_fakes import FakeCloud
from starlette.testclient import TestClient
from updraft.protocol.http.wire import WireRequest
from updraft.router.config import RouterConfig
from updraft.router.router import MAX_PULLS, Router
from updraft.router.server.app import daemon_app
from updraft.router.server.endpoints import Endpoints
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


def test_wrong_requests_are_refused_by_name(http: TestClient) -> None:
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


def test_two_models_are_pulled_at_once_and_no_third() -> None:
    async def ask() -> int:
        router = Router(RouterConfig(local=None, cloud_url="http://127.0.0.1:9", cloud_model="big", ledger=None))
        for _ in range(MAX_PULLS):
            await router.pulling.acquire()
        body = b'{"model": "smollm2"}'
        return (await Endpoints(router).handle(WireRequest("POST", "/updraft/models/pull", body=body))).status

    assert asyncio.run(ask()) == 503


def test_a_trace_asks_no_cloud_and_writes_no_row(http: TestClient, cloud: FakeCloud) -> None:
    http.headers["authorization"] = "Bearer secret"
    body = {"model": "auto", "messages": [{"role": "user", "content": "hello"}]}
    assert http.post("/updraft/trace", json=body).json()["tier"] == "cloud"
    forecast = http.post("/updraft/route", json=body).json()
    assert (forecast["tier"], forecast["cloud_chance"], forecast["cloud_usd"]) == ("cloud", 1.0, None)
    assert cloud.requests == []
    assert http.get("/updraft/requests").json() == {"requests": []}
    http.post("/v1/chat/completions", json=body)
    (row,) = http.get("/updraft/requests").json()["requests"]
    assert (row["tier"], row["ts"]) == ("cloud", row["started_at"])
    assert http.get("/updraft/savings").json()["total"]["requests"] == 1


def test_a_calibrated_pair_shows_its_promise_and_traces_are_not_counted(
    cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(home_in(tmp_path)))
    body = {"model": "auto", "messages": [{"role": "user", "content": "What is 3 + 4?"}]}
    sent = {"authorization": f"Bearer {KEY}"}
    with page_daemon(cloud.url, tmp_path) as url, httpx.Client(base_url=url, headers=sent, timeout=60) as http:
        assert http.get("/updraft/status").json()["calibrated"] is True
        traced = http.post("/updraft/trace", json=body).json()
        assert (traced["tier"], [each["gate"] for each in traced["decisions"]]) == ("local", [0, 1, 2, 3])
        assert "7" in traced["local_text"]
        strict = http.post("/updraft/trace", json=body | {"updraft": {"quality": 1.0}}).json()
        assert strict["tier"] == "cloud"
        forecast = http.post("/updraft/route", json=body).json()
        assert forecast["tier"] == "judged" and 0 < forecast["cloud_chance"] < 1 and forecast["expected_quality"] > 0.9
        assert forecast["p_gain"] == pytest.approx(traced["decisions"][1]["p_gain"])
        assert http.post("/updraft/route", json=body | {"updraft": {"quality": 1.0}}).json()["tier"] == "cloud"
        assert http.post("/updraft/route", json=body | {"model": "local"}).json()["tier"] == "local"
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        seen = http.post("/updraft/route", json=body | {"messages": [{"role": "user", "content": [picture]}]}).json()
        assert (seen["tier"], seen["expected_quality"]) == ("cloud", None), "no gate decides"
        assert http.post("/updraft/route", json={"model": "auto"}).status_code == 400
        report = http.get("/updraft/policy").json()
        assert report["drift"]["requests"] == 0, "a trace is no request"
        shares = [point["cloud_share"] for point in report["curve"]]
        assert shares == sorted(shares)
        assert sum(each["rows"] for each in report["reliability"]) > 1000
        assert http.post("/v1/chat/completions", json=body).json()["updraft"]["tier"] == "local"
        drift = http.get("/updraft/policy").json()["drift"]
        assert (drift["requests"], drift["alarm"], 0 <= drift["distance"] <= 1) == (1, None, True)
        row = http.get("/updraft/requests").json()["requests"][0]
        assert http.get(f"/updraft/requests/{row['id']}").json()["request"]["decisions"] == row["decisions"]
        for name in ("savings", "curve", "reliability"):
            answer = http.get(f"/updraft/charts/{name}?dark")
            assert (answer.headers["content-type"], b"<svg" in answer.content) == ("image/svg+xml", True)
        for dark, status in (("false", 200), ("0", 200), ("maybe", 400)):
            assert http.get(f"/updraft/charts/savings?dark={dark}").status_code == status
        assert http.get("/updraft/charts/other").status_code == 404
        models = http.post("/updraft/models/memory", json={"action": "sleep"}).json()
        assert (models["loaded"], models["pinned"]) == (False, True)
        assert {"smollm2"} <= {each["name"] for each in models["models"]}
        assert cloud.requests == []
        assert http.post("/updraft/target", json={"quality": 2}).status_code == 400
        assert http.post("/updraft/target", json={"quality": 1}).json()["target"] == "quality 1"
        assert http.get("/updraft/policy").json()["drift"]["requests"] == 1, "the same calibration, the same monitor"
        assert http.post("/v1/chat/completions", json=body).json()["updraft"]["tier"] == "cloud"


def test_markdown_that_takes_long_delays_no_other_request() -> None:
    async def ask() -> list[str]:
        endpoints = Endpoints(Router(RouterConfig(local=None, cloud_url="http://127.0.0.1:9", cloud_model="big")))
        ended: list[str] = []

        async def request(method: str, path: str, body: bytes = b"") -> None:
            assert (await endpoints.handle(WireRequest(method, path, body=body))).status == 200
            ended.append(path)

        table = "|a" * 300 + "\n" + "|-" * 300 + "\n" + "|a\n" * 100
        body = msgspec.json.encode({"text": table})
        await asyncio.gather(request("POST", "/updraft/markdown", body), request("GET", "/v1/models"))
        return ended

    assert asyncio.run(ask()) == ["/v1/models", "/updraft/markdown"]


def test_markdown_lets_no_tag_through(http: TestClient) -> None:
    http.headers["authorization"] = "Bearer secret"
    text = "**b** <script>x</script> [l](javascript:x) ![i](https://evil.example/i.png)"
    html = http.post("/updraft/markdown", json={"text": text}).json()["html"]
    assert "<strong>b</strong>" in html
    assert "<script" not in html
    assert "<img" not in html
    assert 'href="javascript' not in html
    assert http.post("/updraft/markdown", json={"text": "x" * 200_001}).status_code == 400
