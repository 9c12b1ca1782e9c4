"""The daemon as a real process on a real port: ready line, the genuine client, bad input, a graceful end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from router_fakes import CLOUD_TEXT, FakeCloud
from starlette.testclient import TestClient
from updraft.protocol.errors import ConfigurationError, PortInUseError
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import DaemonOptions, daemon_app, run_daemon

CODE = """
import sys
from updraft.router.config import RouterConfig
from updraft.router.server.app import DaemonOptions, run_daemon
run_daemon(DaemonOptions(RouterConfig(cloud_url=sys.argv[1], cloud_model="pocket-large", **eval(sys.argv[2])), port=0))
"""
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
def daemon(cloud: FakeCloud) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with running_daemon(cloud, {"local": None}) as address:
        yield address


@contextmanager
def running_daemon(cloud: FakeCloud, settings: dict[str, Any]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-c", CODE, cloud.url, repr(settings)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("ready http://127.0.0.1:")
        yield line.split()[1], process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)
        process.stdout.close()


def test_a_daemon_serves_any_openai_client_and_leaves_gracefully(
    daemon: tuple[str, subprocess.Popen[str]], cloud: FakeCloud
) -> None:
    url, process = daemon
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(model="auto", messages=USER)
        assert raw.parse().choices[0].message.content == CLOUD_TEXT
        assert raw.headers["x-updraft-route"] == "cloud"
        assert len(raw.headers.get_list("x-request-id")) == 1
        stream = client.chat.completions.create(model="cloud", messages=USER, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == CLOUD_TEXT
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt-9", messages=USER)
        assert len(list(client.models.list())) == 4
    with httpx.Client(base_url=url, timeout=30) as http:
        assert http.post("/v1/chat/completions", content=b"{nonsense").json()["error"]["code"] == "invalid_json"
        assert http.post("/v1/embeddings", json={}).json()["error"]["type"] == "invalid_request_error"
        assert http.get("/health").json() == {"status": "ok"}
        question = {"model": "cloud", "messages": USER}
        for origin, status in (
            ("https://evil.example", 403),
            ("null", 403),
            ("http://[", 403),
            ("http://localhost:3000", 200),
        ):
            answer = http.post("/v1/chat/completions", json=question, headers={"origin": origin})
            assert answer.status_code == status, origin
        cloud.mode = "hang"
        body = {"model": "cloud", "messages": USER, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_lines())
        assert http.get("/health").status_code == 200, "a client that goes away in the middle disturbs nobody"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_a_port_in_use_is_refused_before_any_work(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        never_read = tmp_path / "never-read.gguf"
        never_read.touch()
        config = RouterConfig(local=os.fspath(never_read))
        with pytest.raises(PortInUseError):
            run_daemon(DaemonOptions(config, port=taken.getsockname()[1]))


def test_a_key_is_asked_for_where_one_is_set(cloud: FakeCloud) -> None:
    app = daemon_app(Router(RouterConfig(cloud_url=cloud.url, cloud_model="pocket-large")), api_key="secret")
    with TestClient(app) as client:
        question = {"model": "cloud", "messages": USER}
        for key, status in (("secret", 200), ("wrong", 401), ("", 401)):
            answer = client.post("/v1/chat/completions", json=question, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status


def test_the_clients_timeout_is_the_deadline(cloud: FakeCloud) -> None:
    """A slow cloud: the client that waits for 5 seconds gets the device's answer within them."""
    cloud.mode = "slow"
    with running_daemon(cloud, {"local": "pocket", "confidence": 0.999999}) as (url, _):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=5.0) as client:
            completion = client.chat.completions.create(model="auto", messages=USER, max_tokens=8)
            assert completion.model_extra and completion.model_extra["updraft"]["route"] == "fallback"
        body = {"model": "cloud", "messages": USER}
        with httpx.Client(base_url=f"{url}/v1", timeout=20) as http:
            for headers, status in (
                ({"x-updraft-timeout": "0.3", "x-stainless-read-timeout": "600"}, 504),
                ({"x-stainless-timeout": "0.3"}, 504),
                ({"x-updraft-timeout": "soon"}, 400),
                ({"x-updraft-timeout": "-1"}, 400),
            ):
                answer = http.post("/chat/completions", json=body, headers=headers)
                assert answer.status_code == status, headers
            cloud.mode = "healthy"
            answer = http.post("/chat/completions", json=body, headers={"x-stainless-read-timeout": "nan"})
            assert answer.status_code == 200, "what a library says by itself is refused to nobody"


def test_a_key_is_not_asked_for_by_health_and_a_foreign_page_gets_nothing(cloud: FakeCloud) -> None:
    config = RouterConfig(local=None, cloud_url=cloud.url, cloud_model="big", allowed_hosts=("box.lan",))
    with TestClient(daemon_app(Router(config), api_key="secret"), base_url="http://box.lan") as client:
        assert client.get("/health").status_code == 200
        for path in ("/health", "/metrics", "/v1/models", "/v1/chat/completions", "/anything"):
            for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
                sent = {"authorization": "Bearer secret", "content-type": "text/plain", **headers}
                for method in ("GET", "POST", "OPTIONS"):
                    answer = client.request(method, path, headers=sent)
                    assert answer.status_code == 403, (method, path, headers)
                    assert "allowed_" in answer.json()["error"]["message"]
    assert not cloud.requests


def test_a_setting_limits_the_size_of_bodies(cloud: FakeCloud) -> None:
    for megabytes, size, status in ((1, 2**20, 413), (1, 2**19, 200), (12, 10 * 2**20, 200), (12, 12 * 2**20, 413)):
        config = RouterConfig(cloud_url=cloud.url, cloud_model="big", local=None, ledger=None, body_mb=megabytes)
        with TestClient(daemon_app(Router(config)), base_url="http://127.0.0.1") as http:
            body = {"model": "cloud", "messages": [{"role": "user", "content": "x" * size}]}
            assert http.post("/v1/chat/completions", json=body).status_code == status, (megabytes, size)
    for megabytes in (0, 257):
        with pytest.raises(ConfigurationError, match="body_mb"):
            RouterConfig(body_mb=megabytes)


def test_other_machines_need_a_key() -> None:
    with pytest.raises(ConfigurationError, match="--client-api-key-env"):
        DaemonOptions(host="0.0.0.0")
    assert "secret" not in repr(DaemonOptions(api_key="secret"))


def test_every_answer_reports_its_processing_time(cloud: FakeCloud) -> None:
    router = Router(RouterConfig(cloud_url=cloud.url, cloud_model="big", local=None, ledger=None))
    with TestClient(daemon_app(router), base_url="http://127.0.0.1") as http:
        for path, status in (("/v1/models", 200), ("/v1/models/none", 404), ("/nowhere", 404)):
            response = http.get(path)
            assert (response.status_code, int(response.headers["openai-processing-ms"]) >= 0) == (status, True)
            assert len(response.headers.get_list("x-request-id")) == 1


def test_health_wants_no_key(cloud: FakeCloud) -> None:
    router = Router(RouterConfig(cloud_url=cloud.url, cloud_model="big", local=None, ledger=None))
    with TestClient(daemon_app(router, "secret"), base_url="http://127.0.0.1") as http:
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models").status_code == 401
        assert http.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
