"""A web page of another origin reads nothing: no Origin is reflected, also not where no key is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from server_processes import running

PATHS = ("/admin/usage", "/admin/nodes", "/admin/keys", "/v1/models", "/metrics", "/health")
ORIGINS = ("https://evil.example", "null", "http://localhost.evil.example", "file://", "http://localhost@evil.example")


def check(client: httpx.Client, headers: dict[str, str]) -> None:
    for origin in ORIGINS:
        for path in PATHS:
            for method in ("GET", "OPTIONS"):
                asked = {**headers, "origin": origin, "access-control-request-method": "GET"}
                answer = client.request(method, path, headers=asked)
                assert answer.status_code == 403, (method, path, origin)
                assert not [name for name in answer.headers if name.startswith("access-control-")]
    for path in PATHS:
        assert client.get(path, headers={**headers, "host": "evil.example"}).status_code == 403


def test_a_page_with_the_key_reads_nothing(gateway: Any) -> None:
    with httpx.Client(base_url=gateway.url) as client:
        check(client, gateway.admin)


@pytest.mark.parametrize("server", ["gateway", "node"])
def test_a_page_reads_nothing_where_there_is_no_key(gateway: Any, tmp_path: Path, server: str) -> None:
    if server == "node":
        with httpx.Client(base_url=gateway.node_url) as client:
            check(client, {})
        return
    command = ("-m", "updraft", "gateway", "--port", "0", "--node", gateway.node_url, "--no-auth", "--exit-with-parent")
    with running(*command, "--ledger", str(tmp_path / "db")) as process, httpx.Client(base_url=process.url) as client:
        assert client.get("/admin/usage").status_code == 200
        check(client, {})
