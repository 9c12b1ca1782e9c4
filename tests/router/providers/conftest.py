"""A scripted provider for every test, and a way to ask it through the cloud tier."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_provider import Ask, ScriptedProvider, running_provider
from updraft.router.config import RouterConfig
from updraft.router.factory import open_cloud


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedProvider]:
    with running_provider() as provider:
        yield provider


@pytest.fixture
def provider(server: ScriptedProvider) -> ScriptedProvider:
    server.answers.clear()
    server.asked.clear()
    return server


@pytest.fixture
def ask(provider: ScriptedProvider) -> Ask:
    """Send a chat request; the completion, or the chunks of its stream. `settings`: of the router."""

    def ask(settings: dict[str, Any], path: str = "chat/completions", **body: Any) -> Any:
        async def run() -> Any:
            given = {"cloud_url": provider.url, "cloud_model": "m", "cloud_api_key": "sk-secret-1", **settings}
            config = RouterConfig(**given)
            tier = open_cloud(config)
            assert tier is not None
            request = {"model": config.cloud_model, "messages": [{"role": "user", "content": "Hi"}], **body}
            try:
                if not body.get("stream"):
                    return await tier.complete(path, request, timeout_s=60.0)
                stream = await tier.open(path, request, timeout_s=60.0)
                try:
                    return [event async for _, event in stream]
                finally:
                    await stream.aclose()
            finally:
                await tier.aclose()

        return asyncio.run(run())

    return ask
