"""Headers of clients on every endpoint: none is refused, and clouds get only the headers that they may evaluate."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from router_fakes import FakeCloud, ScriptedGates, ScriptedLocal, tiers
from serving import serving
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app

HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
    "/api/chat": {"messages": HELLO, "stream": False},
}
DROPPED = {
    "session-id": "s",
    "x-session-id": "s",
    "thread-id": "t",
    "originator": "agent",
    "b3": "0",
    "x-auth-token": "k",
}


@pytest.mark.parametrize("path", BODIES)
def test_dropped_headers_have_a_note(path: str, cloud: FakeCloud) -> None:
    config = RouterConfig(local="pocket", cloud_url=cloud.url, cloud_model="m")
    app = daemon_app(Router(config, tiers(ScriptedLocal(), config, ScriptedGates())))
    headers = httpx.Headers({**DROPPED, "content-type": "application/json", "x-title": "Café"}, encoding="latin-1")
    body = json.dumps({"model": "cloud", **BODIES[path]})
    with serving(app, lifespan=True) as url:
        response = httpx.post(url + path, content=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    sent = cloud.sent_headers[-1]
    assert sent["x-title"] == "Café"
    assert not DROPPED.keys() & sent.keys()
    notes = response.json()["updraft"]["notes"]
    assert notes == [f"header {name}: not forwarded" for name in DROPPED]
