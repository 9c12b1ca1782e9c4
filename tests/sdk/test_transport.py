"""`updraft.transport()` for other libraries, one router for many clients, and the typed record of a request."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import updraft
from openai_versions import passes_errors_on
from router_fakes import CLOUD_TEXT, LOCAL_TEXT, FakeCloud, ScriptedGates, ScriptedLocal, tiers
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.responses import UpdraftInfo
from updraft.router.config import RouterConfig
from updraft.sdk.transport import httpx_of_openai

USER: Any = [{"role": "user", "content": "hello"}]
httpx = httpx_of_openai()


@pytest.fixture
def config(cloud: FakeCloud, tmp_path: Path) -> RouterConfig:
    return RouterConfig(
        local="pocket", cloud_url=cloud.url, cloud_model="pocket-large", ledger=tmp_path / "ledger.sqlite3"
    )


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedLocal]:
    """Every local tier that was opened."""
    opened_tiers: list[ScriptedLocal] = []

    async def load(config: RouterConfig) -> Any:
        opened_tiers.append(ScriptedLocal())
        return tiers(opened_tiers[-1], config, ScriptedGates())

    monkeypatch.setattr("updraft.router.router.load_tiers", load)
    return opened_tiers


def genuine(config: RouterConfig) -> openai.OpenAI:
    """As LangChain, instructor and others build it: openai's own client, with an HTTP client that was given."""
    client = httpx.Client(transport=updraft.transport(config))
    return openai.OpenAI(api_key="none", http_client=client, max_retries=0)


def test_clients_of_equal_settings_share_one_router(config: RouterConfig, opened: list[ScriptedLocal]) -> None:
    first, second, other = genuine(config), updraft.OpenAI(config=config), genuine(replace(config, hold_tokens=2))
    for client in (first, second, other):
        assert client.chat.completions.create(model="auto", messages=USER).choices[0].message.content == LOCAL_TEXT

    async def ask() -> Any:
        async with httpx.AsyncClient(transport=updraft.async_transport(config)) as client:
            asking = openai.AsyncOpenAI(api_key="none", http_client=client)
            return await asking.chat.completions.create(model="cloud", messages=USER)

    assert asyncio.run(ask()).choices[0].message.content == CLOUD_TEXT
    assert len(opened) == 2
    first.close()
    assert not opened[0].closed
    second.close()
    other.close()
    assert all(local.closed for local in opened)
    assert "updraft-router" not in [thread.name for thread in threading.enumerate()]


@passes_errors_on
def test_closing_one_client_ends_its_own_streams_only(config: RouterConfig, opened: list[ScriptedLocal]) -> None:
    first, second = genuine(config), genuine(config)
    streams = [client.chat.completions.create(model="local", messages=USER, stream=True) for client in (first, second)]
    for stream in streams:
        next(stream)
    first.close()
    with pytest.raises(openai.APIConnectionError, match="closed"):
        list(streams[0])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streams[1] if chunk.choices) in LOCAL_TEXT
    assert opened[0].finished == 1, "the other one's was stopped"
    second.close()


def test_settings_of_a_transport_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="Unknown setting 'cloud'"):
        updraft.transport(cloud="http://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="No model"):
        updraft.transport(RouterConfig())


def test_why_and_feedback(config: RouterConfig) -> None:
    with updraft.OpenAI(config=config) as client:
        reply = client.chat.completions.create(model="auto", messages=USER)
        info = updraft.routing(reply)
        assert isinstance(info, UpdraftInfo)
        assert (info.tier, info.request_id) == ("local", reply.id)
        why = client.updraft.why(info.request_id)
        assert [each["gate"] for each in why.request["decisions"]] == [0, 1, 2, 3]
        assert "answered: by the device" in str(why)
        assert "feedback" not in why.explanation
        noted = client.updraft.feedback(info.request_id, "down")
        assert (noted.feedback, noted.learned) == ("down", False)
        assert client.updraft.feedback(info.request_id, "up").feedback == "up"
        assert client.updraft.why(info.request_id).explanation["feedback"] == "up"
        for ask in (client.updraft.why, lambda unknown: client.updraft.feedback(unknown, "up")):
            with pytest.raises(openai.NotFoundError, match="Request 'chatcmpl-9' is not in the ledger"):
                ask("chatcmpl-9")
        with pytest.raises(openai.BadRequestError, match="thumb"):
            client.updraft.feedback(info.request_id, "sideways")  # type: ignore[arg-type]
        chunks = list(client.chat.completions.create(model="local", messages=USER, stream=True))
        assert [routed.tier for chunk in chunks if (routed := updraft.routing(chunk)) is not None] == ["local"]
    with (
        updraft.OpenAI(config=replace(config, ledger=None)) as client,
        pytest.raises(openai.NotFoundError, match="keeps no ledger"),
    ):
        client.updraft.why("chatcmpl-9")


def test_why_and_feedback_async(config: RouterConfig) -> None:
    async def ask() -> None:
        async with updraft.AsyncOpenAI(config=config) as client:
            reply = await client.chat.completions.create(model="auto", messages=USER)
            assert (await client.updraft.feedback(reply.id, "down")).request_id == reply.id
            assert (await client.updraft.why(reply.id)).request["feedback"] == -1

    asyncio.run(ask())
