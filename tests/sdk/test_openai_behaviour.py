"""Errors, retries, timeouts and headers of `updraft.OpenAI`, as openai documents its client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import updraft
from openai_versions import passes_errors_on
from ports import free_port
from router_fakes import CLOUD_TEXT, FakeCloud
from serving import serving
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app

USER: Any = [{"role": "user", "content": "hello"}]
LIMITS = {
    "x-ratelimit-limit-requests": "60",
    "x-ratelimit-remaining-requests": "59",
    "x-ratelimit-reset-tokens": "6m0s",
}
SOON = {"retry-after-ms": "1"}


def config_of(url: str, tmp_path: Path) -> RouterConfig:
    return RouterConfig(cloud_url=url, cloud_model="pocket-large", ledger=tmp_path / "ledger.sqlite3")


@pytest.fixture
def config(cloud: FakeCloud, tmp_path: Path) -> RouterConfig:
    return config_of(cloud.url, tmp_path)


@pytest.fixture
def client(config: RouterConfig) -> Iterator[updraft.OpenAI]:
    with updraft.OpenAI(config=config) as client:
        yield client


@pytest.mark.parametrize("retries", [0, 2])
def test_a_refused_connection(tmp_path: Path, retries: int) -> None:
    """Also when the circuit breaker is open, and for AsyncOpenAI."""
    config = config_of(f"http://127.0.0.1:{free_port()}/v1", tmp_path)
    with updraft.OpenAI(config=config, max_retries=retries) as client:
        for ask in (
            lambda: client.chat.completions.create(model="cloud", messages=USER),
            lambda: client.chat.completions.create(model="auto", messages=USER, stream=True),
            lambda: client.responses.create(model="auto", input="hello"),
            lambda: client.embeddings.create(model="auto", input="hello"),
        ):
            with pytest.raises(openai.APIConnectionError) as caught:
                ask()
            assert not isinstance(caught.value, openai.APITimeoutError)
            assert config.cloud_url and config.cloud_url in f"{caught.value.message} {caught.value.__cause__}"

    async def test() -> None:
        async with updraft.AsyncOpenAI(config=config, max_retries=retries) as client:
            with pytest.raises(openai.APIConnectionError):
                await client.chat.completions.create(model="cloud", messages=USER)

    asyncio.run(test())


@pytest.mark.parametrize("status", ["429", "500", "503"])
@pytest.mark.parametrize("retries", [0, 1, 2, 4])
def test_max_retries_is_the_number_of_retries(
    client: updraft.OpenAI, cloud: FakeCloud, status: str, retries: int
) -> None:
    cloud.mode, cloud.headers = status, SOON
    for number, fields in enumerate(({}, {"stream": True})):
        cloud.requests.clear()
        with pytest.raises(openai.APIStatusError) as caught:
            client.with_options(max_retries=retries).chat.completions.create(
                model="cloud", messages=[{"role": "user", "content": f"number {number}"}], **fields
            )
        assert (caught.value.status_code, len(cloud.requests)) == (int(status), retries + 1)
    cloud.mode = "healthy"
    assert client.chat.completions.create(model="cloud", messages=USER).choices[0].message.content == CLOUD_TEXT


@passes_errors_on
@pytest.mark.parametrize("retries", [0, 1])
def test_a_cloud_that_is_too_slow_is_asked_again(client: updraft.OpenAI, cloud: FakeCloud, retries: int) -> None:
    client.chat.completions.create(model="cloud", messages=USER)  # the router has started
    cloud.requests.clear()
    cloud.mode = "slow"
    begun = time.monotonic()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(max_retries=retries, timeout=0.5).chat.completions.create(model="cloud", messages=USER)
    assert len(cloud.requests) == retries + 1
    assert time.monotonic() - begun >= 0.5 * (retries + 1)


def test_rate_limits_of_the_cloud_reach_the_app(client: updraft.OpenAI, cloud: FakeCloud, config: RouterConfig) -> None:
    answer = (
        b'{"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [{"index": 0, '
        b'"finish_reason": "stop", "message": {"role": "assistant", "content": "Hi."}}]}'
    )
    chunk = (
        b'data: {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [{"index": 0, '
        b'"finish_reason": "stop", "delta": {"content": "Hi."}}]}\n\ndata: [DONE]\n\n'
    )
    cloud.headers = {**LIMITS, "x-ratelimit-odd": "\x80", "x-other": "private"}

    def check(asked: openai.OpenAI) -> None:
        create = asked.chat.completions.with_raw_response.create
        cloud.says = (200, answer)
        answers = [create(model="cloud", messages=USER).headers]
        answers.append(asked.responses.with_raw_response.create(model="cloud", input="hello").headers)
        cloud.says = (200, chunk)
        answers.append(create(model="cloud", messages=USER, stream=True).headers)
        cloud.says = (429, b'{"error": {"message": "slow down"}}')
        with pytest.raises(openai.RateLimitError) as caught:
            create(model="cloud", messages=USER)
        answers.append(caught.value.response.headers)
        for headers in answers:
            assert {name: value for name, value in headers.items() if name.startswith("x-ratelimit")} == LIMITS
            assert "x-other" not in headers

    check(client.with_options(max_retries=0))
    with (
        serving(daemon_app(Router(config), api_key="secret"), lifespan=True) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as daemon,
    ):
        cloud.headers |= {"retry-after": "7200"}
        check(daemon)


def test_a_prompt_that_breaks_the_cloud_harms_no_other(client: updraft.OpenAI, cloud: FakeCloud) -> None:
    """Whatever else the app changes in its attempts, it stays one prompt."""
    cloud.mode, cloud.headers = "500", SOON
    once = client.with_options(max_retries=0).chat.completions
    for number in range(8):
        with pytest.raises(openai.InternalServerError, match="cloud error 500"):
            once.create(
                model="cloud",
                messages=[{"role": "user", "content": "poison"}],
                temperature=number / 10,
                seed=number,
                stream=number % 2 == 0,
            )
    assert len(cloud.requests) == 8, "the circuit is closed"
    cloud.mode = "healthy"
    assert once.create(model="cloud", messages=USER).choices[0].message.content == CLOUD_TEXT


def test_async_client_under_trio(config: RouterConfig, cloud: FakeCloud) -> None:
    trio = pytest.importorskip("trio")

    async def test() -> None:
        async with updraft.AsyncOpenAI(config=config, max_retries=0) as client:
            create = client.chat.completions.create
            assert (await create(model="cloud", messages=USER)).choices[0].message.content == CLOUD_TEXT
            stream = await create(model="cloud", messages=USER, stream=True)
            assert (
                "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]) == CLOUD_TEXT
            )
            cloud.mode = "hang"
            stream = await create(model="cloud", messages=USER, stream=True)
            await anext(aiter(stream))
            await stream.close()
            cloud.mode = "slow"
            with pytest.raises(openai.APITimeoutError):
                await create(model="cloud", messages=USER, timeout=0.5)
            with trio.move_on_after(0.2) as scope:
                await create(model="cloud", messages=USER)
            assert scope.cancelled_caught

    trio.run(test)
