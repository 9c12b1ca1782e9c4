"""Only a caller with the node's key can set the tenant of a request."""

from __future__ import annotations

from typing import Any

import httpx
import pytest


@pytest.mark.parametrize("authorization", ["", "Bearer wrong", "Bearer canary-node-ke", "Bearer canary-node-keyy"])
def test_a_tenant_without_the_nodes_key_is_refused(node: Any, authorization: str) -> None:
    headers = {"x-updraft-tenant": "somebody", "authorization": authorization}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"):
        assert httpx.post(node.url + path, json={}, headers=headers).status_code == 401
    assert httpx.get(f"{node.url}/metrics", headers=headers).status_code == 401
    assert node.key not in node.log_file.read_text()


def test_a_tenant_shares_no_cached_prefix_with_another(node: Any) -> None:
    def cached(tenant: str) -> int:
        body = {"model": "tiny", "prompt": "A prompt that is longer than one block of the cache.", "max_tokens": 1}
        headers = {**node.headers, "x-updraft-tenant": tenant}
        answer = httpx.post(f"{node.url}/v1/completions", json=body, headers=headers, timeout=60).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("alice") == 0
    assert cached("alice") > 16
    assert cached("bob") == 0


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "1e9", "heavy"])
def test_a_weight_out_of_bounds_is_refused(node: Any, weight: str) -> None:
    headers = {**node.headers, "x-updraft-tenant": "alice", "x-updraft-tenant-weight": weight}
    for path, body in (("completions", {"prompt": "Hi"}), ("embeddings", {"input": "Hi"})):
        answer = httpx.post(f"{node.url}/v1/{path}", json={"model": "tiny", **body}, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "x-updraft-tenant-weight"
