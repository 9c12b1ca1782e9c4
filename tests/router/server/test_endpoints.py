"""The table of endpoints: the route of a path, and the answers to unknown paths and failures."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from updraft.protocol.http.wire import WireRequest, WireResponse
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from updraft.router.server.endpoints import ROUTES, Endpoints
from updraft.router.server.routes.route import RequestContext, Route


async def echo(context: RequestContext) -> WireResponse:
    return WireResponse.json(dict(context.parameters))


async def fail(_: RequestContext) -> WireResponse:
    raise ValueError("a secret")


TABLE = (
    Route("GET /things", echo, "list"),
    Route("POST /things", echo, "create"),
    Route("POST /things/count", echo, "count"),
    Route("GET /things/{thing}", echo, "retrieve"),
    Route("GET /things/{thing}/parts/{part:path}", echo, "a part"),
    Route("GET /v1.0", fail, "fails"),
)


def ask(method: str, path: str) -> tuple[int, Any, str | None]:
    """Status, body, and the `Allow` header."""
    endpoints = Endpoints(Router(RouterConfig(local=None)), TABLE)
    response = asyncio.run(endpoints.handle(WireRequest(method, path)))
    assert isinstance(response.body, bytes)
    return response.status, json.loads(response.body), response.headers.get("allow")


def test_the_method_chooses_among_routes_of_one_path() -> None:
    assert ask("GET", "/things/7/") == (200, {"thing": "7"}, None)
    assert ask("GET", "/things/7?a=b")[:2] == (200, {"thing": "7?a=b"}), "no query: it was encoded"
    assert ask("GET", "/things/count")[:2] == (200, {"thing": "count"})
    assert ask("POST", "/things/count")[:2] == (200, {})
    assert ask("GET", "/things/a/parts/b/c")[:2] == (200, {"thing": "a", "part": "b/c"})


def test_wrong_methods_and_paths_name_the_right_ones() -> None:
    status, body, allowed = ask("DELETE", "/things")
    assert (status, body["error"]["code"], allowed) == (405, "method_not_allowed", "GET, POST")
    for path in ("/", "/thing", "/things/a/b", "/things/a/parts", "/v1x0", "/x/things"):
        status, body, allowed = ask("GET", path)
        assert (status, body["error"]["code"], allowed) == (404, "not_found", None), path
        assert "/things/{thing}/parts/{part}" in body["error"]["message"]


def test_an_exception_that_nobody_expected_tells_nothing() -> None:
    status, body, _ = ask("GET", "/v1.0")
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert "secret" not in str(body)


@given(st.text(min_size=1).filter(lambda text: "/" not in text), st.text(min_size=1))
def test_placeholders_round_trip(thing: str, part: str) -> None:
    route = TABLE[4]
    assert route.match(f"/things/{thing}/parts/{part}") == {"thing": thing, "part": part}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_no_route_shadows_another(route: Route) -> None:
    path = re.sub(r"\{.*?\}", "some", route.path)
    routes = [other for other in ROUTES if other.method == route.method and other.match(path) is not None]
    assert routes[0] is route
    assert route.summary


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_no_route_answers_a_page_of_others_or_another_name(route: Route) -> None:
    path = re.sub(r"\{.*?\}", "some", route.path)
    router = Router(RouterConfig(local=None, ledger=None, cloud_url="http://127.0.0.1:9", cloud_model="big"))
    client = TestClient(daemon_app(router), "http://127.0.0.1:4114")
    for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}, {"origin": "null"}):
        response = client.request(route.method, path, headers=headers)
        assert response.status_code == 403, headers
        assert not [name for name in response.headers if name.startswith("access-control-")]
    assert client.request(route.method, path, headers={"origin": "http://localhost:3000"}).status_code != 403


def test_the_daemon_allows_what_the_table_allows() -> None:
    router = Router(RouterConfig(local=None, ledger=None, cloud_url="http://127.0.0.1:9", cloud_model="big"))
    with TestClient(daemon_app(router)) as client:
        for method in ("OPTIONS", "PUT"):
            response = client.request(method, "/v1/models")
            assert (response.status_code, response.headers["allow"]) == (405, "GET")
        for path in sorted({route.path.replace("{chart}", "curve") for route in ROUTES if route.method == "GET"}):
            head, get = client.head(re.sub(r"\{.*?\}", "a%3Fb", path)), client.get(re.sub(r"\{.*?\}", "a%3Fb", path))
            assert (head.status_code, head.content) == (get.status_code, b""), path
            assert head.headers["content-type"] == get.headers["content-type"], path
        assert "'a?b'" in client.get("/v1/models/a%3Fb").json()["error"]["message"]


def test_unsupported_endpoints_are_refused_by_name() -> None:
    for method, path, says in (
        ("DELETE", "/v1/models/a/b", "updraft rm"),
        ("POST", "/v1/images/edits", "/v1/images/generations"),
        ("POST", "/v1/uploads/u/parts", "provider"),
        ("POST", "/v1/fine_tuning/jobs", "provider"),
        ("POST", "/api/create", "updraft rm"),
    ):
        status, body, _ = ask(method, path)
        assert status == 400 and says in str(body["error"]), path
    assert ask("POST", "/v1/responses/compacted")[0] == 404
