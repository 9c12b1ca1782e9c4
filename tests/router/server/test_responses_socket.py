"""OpenAI's WebSocket protocol for responses, against a daemon that stores nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from router_fakes import CLOUD_TEXT, FakeCloud
from serving import serving
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from websockets.sync.client import ClientConnection, connect

END = ("response.completed", "response.failed", "response.incomplete", "error")


@pytest.fixture
def url(cloud: FakeCloud) -> Iterator[str]:
    config = RouterConfig(cloud_url=cloud.url, cloud_model="pocket-large", local=None)
    with serving(daemon_app(Router(config)), lifespan=True) as url:
        yield f"{url.replace('http', 'ws')}/v1/responses"


@pytest.fixture
def socket(url: str) -> Iterator[ClientConnection]:
    with connect(url) as socket:
        yield socket


def events(socket: ClientConnection) -> list[dict[str, Any]]:
    events = [json.loads(socket.recv(timeout=60))]
    while events[-1]["type"] not in END:
        events.append(json.loads(socket.recv(timeout=60)))
    return events


def create(socket: ClientConnection, **fields: Any) -> dict[str, Any]:
    """The last event of a response."""
    socket.send(json.dumps({"type": "response.create", "model": "cloud", "store": False, **fields}))
    return events(socket)[-1]


def test_the_events_are_those_of_a_stream(socket: ClientConnection) -> None:
    socket.send(json.dumps({"type": "response.create", "model": "cloud", "input": "hello"}))
    told = events(socket)
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert told[-1]["response"]["output"][0]["content"][0]["text"] == CLOUD_TEXT


def test_the_last_response_is_continued_though_it_is_not_stored(socket: ClientConnection, cloud: FakeCloud) -> None:
    first = create(socket, input="one")["response"]
    second = create(socket, input="two", previous_response_id=first["id"])["response"]
    texts = [message["content"] for message in cloud.requests[-1]["messages"]]
    assert texts == ["one", CLOUD_TEXT, "two"]
    assert second["previous_response_id"] == first["id"] and second["store"] is False
    gone = create(socket, input="three", previous_response_id=first["id"])
    assert (gone["status"], gone["error"]["code"]) == (404, "previous_response_not_found")
    assert create(socket, input="four")["type"] == "response.completed", "an error leaves the socket open"


def test_requests_are_answered_in_order(socket: ClientConnection, cloud: FakeCloud) -> None:
    for text in ("one", "two", "three"):
        socket.send(json.dumps({"type": "response.create", "model": "cloud", "input": text}))
    answers = [events(socket)[-1]["response"] for _ in range(3)]
    assert [request["messages"][0]["content"] for request in cloud.requests] == ["one", "two", "three"]
    assert len({answer["id"] for answer in answers}) == 3


def test_another_socket_knows_no_unstored_response(socket: ClientConnection, url: str) -> None:
    first = create(socket, input="one")["response"]
    with connect(url) as other:
        gone = create(other, input="two", previous_response_id=first["id"])
        assert gone["error"]["code"] == "previous_response_not_found"
        assert gone["error"]["param"] == "previous_response_id"


def test_a_failed_continuation_forgets_the_response(socket: ClientConnection) -> None:
    first = create(socket, input="one")["response"]
    output = {"type": "function_call_output", "call_id": "call_of_nobody", "output": "x"}
    failed = create(socket, input=[output], previous_response_id=first["id"])
    assert (failed["type"], failed["error"]["param"]) == ("error", "input[0].call_id")
    retried = create(socket, input="two", previous_response_id=first["id"])
    assert retried["error"]["code"] == "previous_response_not_found"


def test_input_can_be_sent_ahead(socket: ClientConnection, cloud: FakeCloud) -> None:
    ahead = create(socket, input="one", generate=False)["response"]
    assert (ahead["status"], ahead["output"], cloud.requests) == ("completed", [], [])
    create(socket, input="two", previous_response_id=ahead["id"])
    assert [message["content"] for message in cloud.requests[-1]["messages"]] == ["one", "two"]


@pytest.mark.parametrize("message", ['{"type": "response.cancel"}', "[", '{"model": "cloud"}', "{}"])
def test_other_messages_are_refused(socket: ClientConnection, message: str) -> None:
    socket.send(message)
    told = events(socket)[-1]
    assert (told["type"], told["status"], told["error"]["type"]) == ("error", 400, "invalid_request_error")
    assert create(socket, input="one")["type"] == "response.completed"
