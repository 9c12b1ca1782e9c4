"""Requests without a key are counted, not written: a stranger fills neither the ledger nor the log."""

from __future__ import annotations

from typing import Any

import httpx


def test_unauthenticated_requests_leave_only_a_count(gateway: Any) -> None:
    def refused() -> float:
        text = httpx.get(f"{gateway.url}/metrics").text
        counts = [line for line in text.splitlines() if line.startswith('updraft_gateway_requests_total{status="401"}')]
        return float(counts[0].split()[1]) if counts else 0.0

    rows, log, before = gateway.rows(), gateway.log_file.stat().st_size, refused()
    with httpx.Client(base_url=gateway.url) as client:
        for number in range(300):
            headers = {"authorization": f"Bearer wrong-{number}"} if number % 2 else {}
            assert client.post("/v1/chat/completions", content=b"{}" * 1000, headers=headers).status_code == 401
            assert client.get("/admin/usage", headers=headers).status_code == 401
    assert refused() - before == 300
    assert gateway.rows() == rows
    assert gateway.log_file.stat().st_size == log
