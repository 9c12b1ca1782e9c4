"""A model name of 8 MB is refused in few words, and none of it reaches the ledger or the log."""

from __future__ import annotations

from typing import Any

import httpx


def test_a_name_of_megabytes_costs_nothing(gateway: Any) -> None:
    before = size(gateway)
    for _ in range(5):
        body = {"model": "x" * 8_000_000, "messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=gateway.headers, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert len(answer.content) < 1_000
    gateway.rows()
    assert size(gateway) - before < 1_000_000


def size(gateway: Any) -> int:
    files = [*gateway.usage_file.parent.glob("usage.sqlite*"), gateway.log_file]
    return sum(file.stat().st_size for file in files)
