"""SQL in a key, a key's name or its id is text: it opens nothing and changes nothing."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx
import pytest

ATTACKS = (
    "' OR '1'='1",
    "' OR 1=1 --",
    "x' UNION SELECT digest, principal, NULL FROM digests JOIN keys --",
    "'; DROP TABLE keys; --",
    '" OR ""="',
    "%",
    "*",
    "\\",
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_sql_is_text(gateway: Any, attack: str) -> None:
    assert gateway.chat(attack) == 401
    for method, path in (("DELETE", ""), ("POST", "/rotate")):
        url = f"{gateway.url}/admin/keys/{quote(attack, safe='')}{path}"
        assert httpx.request(method, url, headers=gateway.admin).status_code == 404, (method, path)
    assert httpx.post(f"{gateway.url}/admin/keys", json={"name": attack}, headers=gateway.admin).status_code == 400
    names = [key["name"] for key in httpx.get(f"{gateway.url}/admin/keys", headers=gateway.admin).json()["keys"]]
    assert {"operator", "tester"} <= set(names)
    assert gateway.chat() == 200
