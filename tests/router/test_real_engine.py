"""The router over the real on-device engine: a tiny random GGUF through llama.cpp, from the SDK down."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import updraft
from router_fakes import CLOUD_TEXT, FakeCloud
from updraft.protocol.errors import ModelLoadError
from updraft.protocol.http.wire import WireRequest
from updraft.router.config import RouterConfig
from updraft.router.router import Router

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("llama_cpp")
    from tiny_gguf import tiny_model

    return tiny_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf").gguf


def test_a_local_answer_with_logprobs_and_a_stream_of_it(tiny: Path, cloud: FakeCloud) -> None:
    config = RouterConfig(local=str(tiny), cloud_url=cloud.url, cloud_model="pocket-large")
    with updraft.OpenAI(config=config) as client:
        plain = client.chat.completions.create(
            model="tiny", messages=USER, max_tokens=24, logprobs=True, top_logprobs=2
        )
        assert plain.model == "tiny"
        assert plain.usage is not None
        assert plain.usage.completion_tokens == 24
        assert plain.choices[0].finish_reason == "length"
        logprobs = plain.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert (
            bytes(byte for token in logprobs.content for byte in token.bytes or []).decode(errors="replace")
            == plain.choices[0].message.content
        )
        assert all(len(token.top_logprobs) == 2 for token in logprobs.content)
        stream = client.chat.completions.create(model="local", messages=USER, max_tokens=24, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert streamed == plain.choices[0].message.content
    assert not cloud.requests


def test_an_unsure_or_too_long_answer_comes_from_the_cloud(tiny: Path, cloud: FakeCloud) -> None:
    config = RouterConfig(local=str(tiny), cloud_url=cloud.url, cloud_model="pocket-large", confidence=0.9999)
    with updraft.OpenAI(config=config) as client:
        completion = client.chat.completions.create(model="auto", messages=USER, max_tokens=24)
        assert completion.choices[0].message.content == CLOUD_TEXT
        assert completion.model_extra is not None
        assert completion.model_extra["updraft"]["reason"].startswith("uncalibrated")
        long = client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "word " * 2000}])
        assert long.model_extra is not None
        assert long.model_extra["updraft"]["reason"].startswith("beyond the device")
        with pytest.raises(openai.BadRequestError, match="cannot fit the context"):
            client.chat.completions.create(model="local", messages=[{"role": "user", "content": "word " * 2000}])


def test_many_threads_share_the_engine(tiny: Path) -> None:
    with updraft.OpenAI(config=RouterConfig(local=str(tiny))) as client, ThreadPoolExecutor(8) as pool:

        def ask(index: int) -> str | None:
            completion = client.chat.completions.create(model="auto", messages=USER, max_tokens=8 + index % 2)
            return completion.choices[0].message.content

        answers = list(pool.map(ask, range(24)))
    assert len(set(answers[::2])) == len(set(answers[1::2])) == 1


@pytest.mark.parametrize("name", ["absent.gguf", "truncated.gguf"])
def test_a_missing_or_damaged_model_file_is_a_clear_error(tiny: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "truncated.gguf").write_bytes(tiny.read_bytes()[:2000])

    async def test() -> tuple[int, Any]:
        router = Router(RouterConfig(local=str(tmp_path / name)))
        with pytest.raises(ModelLoadError):
            await router.start()
        body = json.dumps({"model": "auto", "messages": USER}).encode()
        response = await router.chat(WireRequest("POST", "/v1/chat/completions", body=body))
        await router.close()
        assert isinstance(response.body, bytes)
        return response.status, json.loads(response.body)

    status, body = asyncio.run(test())
    assert status == 500
    assert body["error"]["code"] == "model_load_failed"
    assert name in body["error"]["message"]


EXIT = """
import sys, updraft
from updraft.router.config import RouterConfig
client = updraft.OpenAI(config=RouterConfig(local=sys.argv[1]))
client.chat.completions.create(model="local", messages=[{"role": "user", "content": "hi"}], max_tokens=8)
print("leaving")
"""


def test_a_script_may_end_without_closing_anything(tiny: Path) -> None:
    command = [sys.executable, "-c", EXIT, str(tiny)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


def test_a_race_that_the_cloud_wins_leaves_a_working_engine(tiny: Path, cloud: FakeCloud) -> None:
    """The device's run is cancelled while it waits for a token, again and again, and then serves as before."""

    async def test() -> None:
        router = Router(
            RouterConfig(
                local=str(tiny), cloud_url=cloud.url, cloud_model="pocket-large", race_above=0.0, confidence=1e-30
            )
        )

        async def ask(model: str) -> dict[str, Any]:
            body = json.dumps({"model": model, "messages": USER, "max_tokens": 200, "ignore_eos": True}).encode()
            response = await router.chat(WireRequest("POST", "/v1/chat/completions", body=body))
            assert isinstance(response.body, bytes)
            return json.loads(response.body)

        try:
            await ask("local")
            raced = await asyncio.gather(*(ask("auto") for _ in range(24)))
            assert all(each["updraft"]["tier"] in ("local", "cloud") for each in raced)
            assert any("answered first" in each["updraft"]["reason"] for each in raced)
            assert (await ask("local"))["usage"]["completion_tokens"] == 200
        finally:
            await router.close()

    asyncio.run(asyncio.wait_for(test(), 120))
