"""Chats over a WebSocket of a real daemon: concurrent, cancelled by either side, and HTTP checks before the upgrade."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from socket import create_connection
from typing import Any
from urllib.parse import urlsplit

import pytest
from router_fakes import CLOUD_TEXT, FakeCloud
from waiting import wait_for
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

CODE = """
import sys
from updraft.router.config import RouterConfig
from updraft.router.server.app import DaemonOptions, run_daemon
config = RouterConfig(cloud_url=sys.argv[1], cloud_model="pocket-large", local=None)
run_daemon(DaemonOptions(config, port=0, api_key="secret"))
"""
KEY = {"authorization": "Bearer secret"}
CHAT = {"model": "cloud", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def daemon(cloud: FakeCloud) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of its chats."""
    process = subprocess.Popen([sys.executable, "-c", CODE, cloud.url], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().split()[1]
        yield f"{url.replace('http', 'ws')}/v1/chat/ws", process
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()


def ask(socket: ClientConnection, **fields: Any) -> None:
    socket.send(json.dumps(fields))


def told(socket: ClientConnection) -> dict[str, Any]:
    return json.loads(socket.recv(timeout=60))


def until(socket: ClientConnection, kind: str) -> list[dict[str, Any]]:
    messages = [told(socket)]
    while messages[-1]["type"] != kind:
        messages.append(told(socket))
    return messages


def text_of(messages: list[dict[str, Any]], chat_id: str) -> str:
    chunks = [message["chunk"] for message in messages if message["type"] == "chunk" and message["id"] == chat_id]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_chats_of_one_socket(daemon: tuple[str, subprocess.Popen[str]], cloud: FakeCloud) -> None:
    with connect(daemon[0], additional_headers=KEY) as socket:
        ask(socket, id="whole", **CHAT)
        whole = told(socket)
        assert (whole["type"], whole["id"]) == ("completion", "whole")
        assert whole["completion"]["choices"][0]["message"]["content"] == CLOUD_TEXT
        for chat_id in ("a", "b"):
            ask(socket, id=chat_id, stream=True, **CHAT)
        messages = until(socket, "done")
        messages += until(socket, "done")
        assert text_of(messages, "a") == text_of(messages, "b") == CLOUD_TEXT
        for fields, param in (
            ({"id": "", **CHAT}, "id"),
            ({"id": "c", "type": "shout"}, "type"),
            ({"id": "c", "model": "nobody", "messages": []}, "model"),
        ):
            ask(socket, **fields)
            failed = told(socket)
            assert (failed["type"], failed["error"]["param"]) == ("error", param)
        socket.send("no JSON")
        assert told(socket)["error"]["code"] == "invalid_json"
        cloud.mode = "cut"
        ask(socket, id="cut", stream=True, **CHAT)
        assert until(socket, "error")[-1]["id"] == "cut"


def test_a_chat_is_cancelled_by_a_message_and_by_leaving(
    daemon: tuple[str, subprocess.Popen[str]], cloud: FakeCloud
) -> None:
    cloud.mode = "hang"
    with connect(daemon[0], additional_headers=KEY) as socket:
        for chat_id in ("a", "b"):
            ask(socket, id=chat_id, stream=True, **CHAT)
        assert until(socket, "chunk")
        ask(socket, id="a", **CHAT)
        assert "is still running" in until(socket, "error")[-1]["error"]["message"]
        ask(socket, id="a", type="cancel")
        assert until(socket, "cancelled")[-1]["id"] == "a"
        wait_for(lambda: cloud.disconnects == 1)
        ask(socket, id="a", type="cancel")  # it has ended: nothing to say
    wait_for(lambda: cloud.disconnects == 2)


def test_bounds(daemon: tuple[str, subprocess.Popen[str]], cloud: FakeCloud) -> None:
    cloud.mode = "slow"
    with connect(daemon[0], additional_headers=KEY) as socket:
        for number in range(33):
            ask(socket, id=str(number), **CHAT)
        refused = told(socket)
        assert (refused["id"], refused["error"]["code"]) == ("32", "overloaded")
        with pytest.raises(ConnectionClosed):
            socket.send(" " * (9 * 2**20))
            told(socket)
    cloud.mode = "healthy"
    with connect(daemon[0], additional_headers=KEY) as socket:
        ask(socket, id="again", **CHAT)
        assert told(socket)["type"] == "completion"


@pytest.mark.parametrize(
    ("headers", "host", "origin", "status"),
    [
        ({}, "127.0.0.1", None, 401),
        ({"authorization": "Bearer wrong"}, "127.0.0.1", None, 401),
        (KEY, "127.0.0.1", "https://evil.example", 403),
        (KEY, "evil.example", None, 403),
        ({**KEY, "x-updraft-timeout": "soon"}, "127.0.0.1", None, 400),
    ],
)
def test_the_http_checks_apply(
    daemon: tuple[str, subprocess.Popen[str]], headers: dict[str, str], host: str, origin: Any, status: int
) -> None:
    address = urlsplit(daemon[0])
    with (
        create_connection((str(address.hostname), address.port or 0)) as sock,
        pytest.raises(InvalidStatus) as refused,
        connect(daemon[0].replace("127.0.0.1", host), sock=sock, additional_headers=headers, origin=origin),
    ):
        pass
    assert refused.value.response.status_code == status
    assert json.loads(refused.value.response.body or b"")["error"]["message"]


def test_an_open_socket_does_not_delay_the_end(daemon: tuple[str, subprocess.Popen[str]]) -> None:
    url, process = daemon
    with connect(url, additional_headers={"x-api-key": "secret"}, origin="http://localhost:3000") as socket:  # pyright: ignore[reportArgumentType] - a plain text will do
        ask(socket, id="a", **CHAT)
        assert told(socket)["type"] == "completion"
        process.terminate()
        assert process.wait(60) == 0
