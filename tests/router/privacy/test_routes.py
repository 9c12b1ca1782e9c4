"""A private text goes to no cloud, by whatever endpoint, and wherever in its request it stands."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from route_requests import BODIES, FORMS, form, places, post, unknown_routes, with_text
from router_fakes import FakeCloud, ScriptedGates, ScriptedLocal, tiers
from updraft.protocol.http.wire import WireRequest, WireResponse
from updraft.router.config import RouterConfig
from updraft.router.privacy.rules import Privacy
from updraft.router.router import Router
from updraft.router.server.endpoints import Endpoints

SECRET = "jane.roe@example.org"


def answered(cloud: FakeCloud, requests: list[WireRequest], *, private: bool = True) -> list[WireResponse]:
    config = RouterConfig(
        local="pocket",
        cloud_url=cloud.url,
        cloud_model="pocket-large",
        privacy=Privacy(builtin=("email",) if private else ()),
    )

    async def run() -> list[WireResponse]:
        endpoints = Endpoints(Router(config, tiers(ScriptedLocal(), config, ScriptedGates(before=True))))
        try:
            return [await endpoints.handle(request) for request in requests]
        finally:
            await endpoints.close()

    return asyncio.run(run())


def test_every_endpoint_is_known() -> None:
    assert not unknown_routes(), "say in route_requests.py what they send, or that no cloud is asked"


@pytest.mark.parametrize("path", BODIES)
def test_a_private_text_stays_wherever_it_stands(cloud: FakeCloud, path: str) -> None:
    body = BODIES[path]
    [usual] = answered(cloud, [post(path, body)])
    assert cloud.requests, (usual.status, usual.body)
    cloud.requests.clear()
    sent = [post(path, with_text(body, place, SECRET, as_name=as_name)) for as_name in (False, True)
            for place in places(body) if not (as_name and isinstance(place[-1], int))]  # fmt: skip
    for response in answered(cloud, sent):
        assert response.status in (200, 400, 404), response.body
    leaked = [each for each in cloud.requests if SECRET in json.dumps(each)]
    assert leaked == []
    cloud.requests.clear()
    answered(cloud, [post(path, body, {"x-note": SECRET}), post(path, body, query=f"note={SECRET}")])
    assert cloud.requests == []


@pytest.mark.parametrize("path", FORMS)
def test_a_form_is_kept_from_the_cloud_by_any_rule(cloud: FakeCloud, path: str) -> None:
    [response] = answered(cloud, [form(path, SECRET)])
    assert error_of(response)["code"] == "private"
    assert cloud.requests == []
    answered(cloud, [form(path, SECRET)], private=False)
    assert len(cloud.requests) == 1


def error_of(response: WireResponse) -> dict[str, Any]:
    assert isinstance(response.body, bytes)
    return json.loads(response.body)["error"]
