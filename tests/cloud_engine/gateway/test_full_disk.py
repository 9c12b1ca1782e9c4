"""A gateway whose disk is full: usage is shown, requests do what the operator chose, SIGTERM ends it."""

from __future__ import annotations

import importlib
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the files of another process")
BODY = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}
FULL = 4096  # bytes, beyond which no file grows


def rows(db: Path) -> int:
    with closing(sqlite3.connect(db)) as connection:
        return connection.execute("SELECT COUNT(*) FROM usage WHERE state = 'settled'").fetchone()[0]


@pytest.mark.parametrize("action", ["stop", "continue"])
def test_a_full_disk(spawn: Any, fake_node: Any, tmp_path: Path, action: str) -> None:
    resource, db = importlib.import_module("resource"), tmp_path / "usage"
    command = ("gateway", "--port", "0", "--no-auth", "--node", fake_node.url, "--ledger-failure", action)
    running = spawn("-m", "updraft", *command, "--ledger", str(db))
    with httpx.Client(base_url=running.url, timeout=30) as client:
        assert client.post("/v1/chat/completions", json=BODY).status_code == 200
        assert client.get("/admin/usage").json()["usage"][0]["requests"] == 1
        resource.prlimit(running.popen.pid, resource.RLIMIT_FSIZE, (FULL, resource.RLIM_INFINITY))
        assert client.post("/v1/chat/completions", json=BODY).status_code == 200  # its row waits, and shows the failure
        wait_for(lambda: "\nupdraft_gateway_ledger_failing 1" in client.get("/metrics").text)
        answers = [client.post("/v1/chat/completions", json=BODY) for _ in range(3)]
        if action == "continue":
            assert [answer.status_code for answer in answers] == [200] * 3
        else:
            assert [answer.json()["error"]["code"] for answer in answers] == ["ledger_unavailable"] * 3
        usage = client.get("/admin/usage")
        assert usage.status_code == 200, usage.text
        health = client.get("/health")
        assert (health.status_code, health.json()["ledger"]) == (200, "unavailable")
        assert "\nupdraft_gateway_ledger_failing 1" in client.get("/metrics").text
        resource.prlimit(running.popen.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        while client.post("/v1/chat/completions", json=BODY).status_code != 200:
            pass
        while rows(db) < (6 if action == "continue" else 3):
            assert client.get("/admin/usage").status_code == 200
        resource.prlimit(running.popen.pid, resource.RLIMIT_FSIZE, (FULL, resource.RLIM_INFINITY))
        client.post("/v1/chat/completions", json=BODY)
    running.popen.terminate()
    assert running.popen.wait(60) == 0
