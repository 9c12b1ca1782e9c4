"""Secrets of an operator: what a gateway writes, serves and starts holds none of them, in good times and bad."""

from __future__ import annotations

import base64
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import AsyncMock

import httpx
import psutil
import pytest
from gateway_keys import make_key
from starlette.requests import Request
from updraft.cloud_engine.gateway.ledger.metering import UsageRow
from updraft.cloud_engine.gateway.limits.accounting import AccountingOptions
from updraft.cloud_engine.gateway.process import GatewayOptions
from updraft.cloud_engine.gateway.relay.call import read_call
from updraft.cloud_engine.gateway.upstream.client import Upstream
from updraft.protocol.errors import ConfigurationError

PASSWORD, NODE_KEY, PROMPT = "canary-password", "canary-node-key", "canary-prompt"
BASIC = base64.b64encode(f"operator:{PASSWORD}".encode()).decode()


class _Echo(BaseHTTPRequestHandler):
    """A node that refuses every request, and quotes the key that it was sent."""

    seen: list[str]

    def do_GET(self) -> None:
        self._reply(200, b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        sent = self.headers.get("authorization", "")
        self.seen.append(sent)
        self._reply(401, b'{"error": {"message": "I do not take %b"}}' % sent.encode())

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Keep the test's output clean."""


@contextmanager
def _echo() -> Iterator[tuple[int, list[str]]]:
    handler: Any = type("Echo", (_Echo,), {"seen": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port, handler.seen
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def _gateway(
    folder: Path, *nodes: str, log_format: str = "text"
) -> Iterator[tuple[str, dict[str, str], subprocess.Popen[str]]]:
    key = make_key(folder / "keys", "tester", "inference", "usage", "admin")
    command = [sys.executable, "-m", "updraft", "gateway", "--port", "0", "--keys", str(folder / "keys")]
    command += ["--log-format", log_format]
    command += ["--ledger", str(folder / "usage.sqlite"), *(word for node in nodes for word in ("--node", node))]
    with (folder / "log").open("w") as log:
        environment = {**os.environ, "UPDRAFT_NODE_API_KEY": NODE_KEY}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        with process:
            try:
                assert process.stdout is not None
                yield process.stdout.readline().split()[1], {"authorization": f"Bearer {key}"}, process
            finally:
                process.terminate()


def test_passwords_keys_and_prompts_are_shown_nowhere(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}]}
    with _echo() as (port, seen), _echo() as (other, seen_by_other):
        down = f"http://operator:{PASSWORD}@127.0.0.1:1"
        nodes = (f"http://operator:{PASSWORD}@127.0.0.1:{port}/v1", f"http://127.0.0.1:{other}", down)
        with _gateway(tmp_path, *nodes) as (url, headers, process):

            def post(more: dict[str, Any]) -> httpx.Response:
                return httpx.post(f"{url}/v1/chat/completions", json={**body, **more}, headers=headers, timeout=60)

            shown = [post({}), post({}), post({"stream": True}), post({"stream": True}), post({"model": "x"})]
            paths = ("/metrics", "/health", "/admin/nodes", "/admin/usage", "/v1/models")
            shown += [httpx.get(f"{url}{path}", headers=headers) for path in paths]
            children = [word for child in psutil.Process(process.pid).children() for word in child.cmdline()]
        assert f"127.0.0.1:{port}" in shown[5].text
    assert set(seen) == {f"Basic {BASIC}"}
    assert set(seen_by_other) == {f"Bearer {NODE_KEY}"}
    with closing(sqlite3.connect(tmp_path / "usage.sqlite")) as connection:
        rows = list(map(str, connection.execute("SELECT * FROM usage")))
    texts = [*(each.text + str(each.headers) for each in shown), (tmp_path / "log").read_text(), *rows, *children]
    key = headers["authorization"].split()[1]
    secrets = (PASSWORD, NODE_KEY, BASIC, PROMPT, key)
    assert not [text for text in texts if any(secret in text for secret in secrets)]
    assert len(rows) == 5


def test_a_log_of_objects_holds_no_secret_and_no_prompt(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}]}
    with ExitStack() as node:
        port, _ = node.enter_context(_echo())
        shown = f"http://operator:{PASSWORD}@127.0.0.1:{port}"
        with _gateway(tmp_path, shown, log_format="json") as (url, headers, _process):
            deadline = time.monotonic() + 60
            while not httpx.get(f"{url}/v1/models", headers=headers).json()["data"] and time.monotonic() < deadline:
                time.sleep(0.05)  # only a node that was in can be out
            httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
            node.close()
            deadline = time.monotonic() + 60
            while not (tmp_path / "log").read_text() and time.monotonic() < deadline:
                time.sleep(0.05)
    text = (tmp_path / "log").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[0]["level"] == "warning"
    assert lines[0]["message"].startswith(f"Node http://127.0.0.1:{port} is out")
    secrets = (PASSWORD, NODE_KEY, BASIC, PROMPT, headers["authorization"].split()[1])
    assert not [secret for secret in secrets if secret in text]


def test_a_key_that_no_header_holds_is_refused_at_the_start_without_being_quoted() -> None:
    with pytest.raises(ConfigurationError) as refused:
        Upstream(f"{NODE_KEY}\n")
    assert NODE_KEY not in refused.value.message


def test_a_short_key_of_a_node_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigurationError, match="at least 8 characters"):
        Upstream("secret")


def test_invalid_address_is_quoted_without_its_password(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "updraft", "gateway", "--no-auth", "--ledger", str(tmp_path / "db")]
    done = subprocess.run(
        [*command, "--node", f"ftp://operator:{PASSWORD}@host"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "ftp://host" in done.stderr
    assert PASSWORD not in done.stderr


def test_options_do_not_print_their_secrets(tmp_path: Path) -> None:
    options = GatewayOptions(
        [f"http://operator:{PASSWORD}@host"], AccountingOptions("postgresql://u:pw@h"), node_api_key=NODE_KEY
    )
    assert PASSWORD not in repr(options)
    assert NODE_KEY not in repr(options)


def test_a_long_name_costs_nothing(tmp_path: Path) -> None:
    with _echo() as (port, _), _gateway(tmp_path, f"http://127.0.0.1:{port}") as (url, headers, _process):
        body = {"model": "canary" + "m" * 8_000_000, "messages": []}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        httpx.get(f"{url}/admin/usage", headers=headers)
    assert answer.status_code == 400
    assert len(answer.content) < 400
    assert (tmp_path / "usage.sqlite").stat().st_size < 100_000


def test_callers_choose_no_account_of_the_operator() -> None:
    """Headers of OpenAI's that belong to its key do not reach a node, whose key is the operator's."""
    own = {"openai-organization": "org-1", "openai-project": "proj-1", "idempotency-key": "k"}
    headers = [(name.encode(), value.encode()) for name, value in {**own, "x-title": "app"}.items()]
    scope = {"type": "http", "path": "/v1/chat/completions", "query_string": b"", "headers": headers}
    body = b'{"model":"m","messages":[]}'
    call = read_call(Request(scope), body, UsageRow(request_id="id"), 0.0, AsyncMock())
    assert call.forwarded == [(b"x-title", b"app")]
