"""Streams over real sockets: many at once lose and reorder nothing, silent ones are kept alive, and none is held."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import updraft
from router_fakes import FakeGeneration, FakeToken, ScriptedLocal, tiers
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from weighed_daemon import weighed_daemon

CHUNKS = 20
USER: list[Any] = [{"role": "user", "content": "hello"}]


def chunk(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    event = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


@contextmanager
def counting_cloud(at_once: int) -> Iterator[str]:
    """A cloud whose streams count, each in its own name. None goes on before `at_once` have begun."""
    begun, all_there = 0, asyncio.Event()

    async def events(name: str) -> AsyncIterator[bytes]:
        nonlocal begun
        begun += 1
        if begun % at_once == 0:
            all_there.set()
        for number in range(CHUNKS):
            yield chunk(f"{name}:{number} ")
            if number == 0:
                await asyncio.wait_for(all_there.wait(), 120)
            await asyncio.sleep(0)
        yield chunk("", "stop") + b"data: [DONE]\n\n"

    async def chat(request: Request) -> Response:
        body = await request.json()
        return StreamingResponse(events(body["messages"][-1]["content"]), media_type="text/event-stream")

    with serving(Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])) as url:
        yield f"{url}/v1"


async def read_all(url: str, streams: int) -> None:
    """Request `count` streams at once, and check every chunk of each."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits, trust_env=False) as client:

        async def one(name: str) -> None:
            body = {"model": "cloud", "stream": True, "messages": [{"role": "user", "content": name}]}
            async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                assert response.status_code == 200, await response.aread()
                lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line[:1] == "d"]
            assert lines.pop() == "[DONE]"
            told = [choice["delta"].get("content") for line in lines for choice in json.loads(line)["choices"]]
            assert [text for text in told if text] == [f"{name}:{number} " for number in range(CHUNKS)]

        await asyncio.gather(*(one(f"s{number}") for number in range(streams)))


@pytest.mark.parametrize(
    ("streams", "rounds"), [(50, 1), pytest.param(500, 5, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
def test_many_streams_at_once(streams: int, rounds: int) -> None:
    """Of rounds after a first one, none adds much."""
    weights: list[int] = []
    with counting_cloud(streams) as cloud, weighed_daemon(cloud) as daemon:
        for _ in range(rounds):
            asyncio.run(read_all(daemon.url, streams))
            weights.append(daemon.weight())
    grown = [after - before for before, after in itertools.pairwise(weights)]
    print(streams, [f"{each / 2**20:.2f} MB" for each in grown])
    assert sum(grown[1:]) < 2**20, f"{grown} bytes in rounds of {streams} streams"


class GatedCloud:
    """A cloud whose second chunk waits for a gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    async def chat(self, _request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield chunk("one")
            assert await asyncio.to_thread(self.gate.wait, 60), "nobody has read the first chunk"
            yield chunk(" two") + chunk("", "stop") + b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @contextmanager
    def running(self) -> Iterator[str]:
        with serving(Starlette(routes=[Route("/v1/chat/completions", self.chat, methods=["POST"])])) as url:
            yield f"{url}/v1"


class GatedLocal(ScriptedLocal):
    """A device whose second token waits for a gate."""

    def __init__(self) -> None:
        super().__init__("one two")
        self.gate = threading.Event()

    async def start(self, messages: Any, params: Any, **_: Any) -> FakeGeneration:
        self.running += 1
        return GatedRun(self, re.findall(r"\s*\S+", self.text), params.max_tokens)


class GatedRun(FakeGeneration):
    async def __anext__(self) -> FakeToken:
        if self.answer.tokens and isinstance(self._tier, GatedLocal):
            assert await asyncio.to_thread(self._tier.gate.wait, 60), "nobody has read the first token"
        return await super().__anext__()


def opens_at_the_first_text(stream: Any, gate: threading.Event) -> str:
    """All of the text. What was held back would never come."""
    text = ""
    for part in stream:
        text += part.choices[0].delta.content or "" if part.choices else ""
        if text:
            gate.set()
    return text


def test_the_first_chunk_of_a_cloud_leaves_at_once() -> None:
    for through_daemon in (True, False):
        cloud = GatedCloud()
        with cloud.running() as url:
            config = RouterConfig(cloud_url=url, cloud_model="big")
            if through_daemon:
                with serving(daemon_app(Router(config)), lifespan=True) as daemon, client_of(daemon) as client:
                    stream = client.chat.completions.create(model="cloud", messages=USER, stream=True)
                    assert opens_at_the_first_text(stream, cloud.gate) == "one two"
            else:
                with updraft.OpenAI(config=config) as client:
                    stream = client.chat.completions.create(model="cloud", messages=USER, stream=True)
                    assert opens_at_the_first_text(stream, cloud.gate) == "one two"


def test_the_first_token_of_the_device_leaves_at_once() -> None:
    local = GatedLocal()
    config = RouterConfig(local="pocket")
    app = daemon_app(Router(config, tiers(local, config)))
    with serving(app, lifespan=True) as daemon, client_of(daemon) as client:
        stream = client.chat.completions.create(model="local", messages=USER, stream=True)
        assert opens_at_the_first_text(stream, local.gate) == "one two"


def test_a_silent_stream_of_the_daemon_is_kept_alive() -> None:
    """The cloud goes on when the client has had a comment."""
    cloud = GatedCloud()
    with cloud.running() as url:
        config = RouterConfig(cloud_url=url, cloud_model="big", heartbeat_s=0.02)
        with serving(daemon_app(Router(config)), lifespan=True) as daemon, httpx.Client(timeout=60) as client:
            body = {"model": "cloud", "messages": USER, "stream": True}
            with client.stream("POST", f"{daemon}/v1/chat/completions", json=body) as response:
                received = b""
                for piece in response.iter_raw():
                    received += piece
                    if b": keep-alive\n\n" in received:
                        cloud.gate.set()
    assert received.endswith(b"data: [DONE]\n\n")
    assert all(event.startswith((b"data: ", b": keep-alive")) for event in received.split(b"\n\n") if event)


def client_of(daemon: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{daemon}/v1", api_key="none", max_retries=0)
