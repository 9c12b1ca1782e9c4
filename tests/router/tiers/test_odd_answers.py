"""Clouds that keep to OpenAI's form only roughly: what can be read is an answer, an error keeps its words."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from updraft.protocol.dialects.chat_chunks import ChatChunks
from updraft.router.tiers.answer_shapes import completion_in
from updraft.router.tiers.cloud import HttpCloudTier
from updraft.router.tiers.connection import CloudEndpoint, HttpCloudStream
from updraft.router.tiers.failures import CloudFailure, refused
from updraft.router.tiers.providers.provider import OpenAIProvider

URL = "https://cloud.example/v1"
ENDPOINT = CloudEndpoint(URL, timeout_s=60.0)


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


TEXT = [chunk({"role": "assistant", "content": "Hel"}), chunk({"content": "lo"}), chunk({}, "stop")]


def streamed(*events: Any, content_type: str = "text/event-stream") -> list[dict[str, Any]]:
    """The events that a stream of these gives."""

    async def run() -> list[dict[str, Any]]:
        async def body():
            for event in events:
                yield b"data: " + json.dumps(event).encode() + b"\n\n"

        headers = {"content-type": content_type} if content_type else {}
        stream = HttpCloudStream(httpx.Response(200, headers=headers, content=body()), ENDPOINT)
        await stream.wait_for_content()
        return [event async for _, event in stream]

    return asyncio.run(run())


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def whole(message: dict[str, Any], finish: str | None = "stop") -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion", "choices": [choice]}


@pytest.mark.parametrize(
    "events",
    [
        [*TEXT, whole({"content": "Hello"})],
        [whole({"content": "Hello"})],
        [*TEXT[:1], whole({"content": "Hello"})],
        [whole({"content": "Hel"}, None), whole({"content": "Hello"})],
        [whole({"content": "Hel"}, None), whole({"content": "lo"})],
        [*TEXT, whole({"content": "Hi there"})],
        [*TEXT[:2], whole({"content": None}, "stop")],
    ],
    ids=["after deltas", "alone", "longer than the deltas", "growing", "in pieces", "in other words", "empty"],
)
def test_a_streamed_message_adds_only_what_is_new(events: list[dict[str, Any]]) -> None:
    read = streamed(*events)
    assert text_of(read) == "Hello"
    assert all("message" not in choice for event in read for choice in event["choices"])
    assert [choice["finish_reason"] for event in read for choice in event["choices"]][-1] == "stop"
    assert {event.get("object") for event in read} <= {None, "chat.completion.chunk"}


def call(arguments: str, identifier: str = "c1") -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize("begun", [[], [call('{"a":1}')], [call('{"a"')]], ids=["none", "whole", "begun"])
def test_the_calls_of_a_streamed_message_are_not_repeated(begun: list[dict[str, Any]]) -> None:
    calls = [call('{"a":1}'), call('{"b":2}', "c2")]
    message = whole({"content": "", "tool_calls": calls}, "tool_calls")
    chunks = ChatChunks()
    for event in streamed(
        *([chunk({"tool_calls": [{"index": 0, **each} for each in begun]})] if begun else []), message
    ):
        chunks.read(event)
    (choice,) = chunks.whole()["choices"]
    assert (choice["message"]["tool_calls"], choice["finish_reason"]) == (calls, "tool_calls")


@pytest.mark.parametrize(
    "content_type", ["Text/Event-Stream; charset=UTF-8", "text/plain", "", "application/octet-stream"]
)
def test_a_stream_is_one_whatever_it_is_called(content_type: str) -> None:
    assert text_of(streamed(*TEXT, content_type=content_type)) == "Hello"


@pytest.mark.parametrize("target", ["http://xn--/v1", "http://[::1", "http://\u00fc\u00fc:x/", "//", "http://h:1/new"])
def test_a_redirect_is_one_wherever_it_leads(target: str) -> None:
    async def run() -> None:
        async def redirects(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            head = b"HTTP/1.1 308 Moved\r\ncontent-length: 0\r\nconnection: close\r\nlocation: "
            writer.write(head + target.encode() + b"\r\n\r\n")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(redirects, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            tier = HttpCloudTier(CloudEndpoint(f"http://127.0.0.1:{port}/v1"))
            with pytest.raises(CloudFailure, match="a redirect to") as caught:
                await tier.complete("chat/completions", {"model": "m"}, timeout_s=60)
            await tier.aclose()
        assert (caught.value.kind, caught.value.error.code) == ("refused", "redirected")
        assert ("http://h:1/new" in str(caught.value)) == (target == "http://h:1/new")

    asyncio.run(run())


@pytest.mark.parametrize("content_type", ["application/json", "text/html; charset=utf-8"])
def test_other_content_types_are_no_stream(content_type: str) -> None:
    with pytest.raises(CloudFailure, match="other than an event stream"):
        streamed(*TEXT, content_type=content_type)


@pytest.mark.parametrize(("content_type", "again"), [("text/plain", False), ("text/event-stream", True)])
def test_only_a_stream_that_ends_early_is_asked_for_again(content_type: str, again: bool) -> None:
    async def run() -> None:
        headers = {"content-type": content_type}
        response = httpx.Response(200, headers=headers, content=b"Welcome to the router.\n\n")
        stream = HttpCloudStream(response, ENDPOINT)
        await stream.wait_for_content()

    with pytest.raises(CloudFailure) as caught:
        asyncio.run(run())
    assert caught.value.transient is again
    assert URL in caught.value.error.message


@pytest.mark.parametrize("raw", [b"<html>", b"{}", b'{"choices": [{}]}'])
def test_invalid_whole_answer_names_the_cloud(raw: bytes) -> None:
    with pytest.raises(CloudFailure) as caught:
        completion_in(raw, URL, OpenAIProvider(), lambda error: error)
    assert URL in caught.value.error.message


@pytest.mark.parametrize("sign", [{"object": "ping"}, {"choices": None, "usage": None}])
def test_a_sign_of_life_ends_no_stream(sign: dict[str, Any]) -> None:
    assert text_of(streamed(sign, *TEXT[:2], sign, TEXT[2])) == "Hello"


def test_an_error_with_status_200_keeps_its_words_and_its_code() -> None:
    body = json.dumps({"error": {"message": "Slow down.", "code": 429}}).encode()
    with pytest.raises(CloudFailure) as caught:
        completion_in(body, URL, OpenAIProvider(), lambda error: error)
    assert (caught.value.error.status, caught.value.error.message) == (429, "Slow down.")
    assert caught.value.allows("unreachable")


def test_a_status_that_nobody_may_send_on_is_a_broken_server() -> None:
    assert refused(URL, 999, {}, b"{}").error.status == 502
