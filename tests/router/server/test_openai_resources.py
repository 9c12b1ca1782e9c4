"""Each call of the openai client's resources, strictly validated by its own types: plain, raw and as a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import openai
import pytest
from router_fakes import ScriptedLocal, tiers
from serving import serving
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app

Given = Callable[[openai.OpenAI], dict[str, Any]]
CHAT: dict[str, Any] = {"model": "local", "messages": [{"role": "assistant", "content": "Hello."}]}
TEXT: dict[str, Any] = {"model": "local", "prompt": "one"}
ASKED: dict[str, Any] = {"model": "local", "input": "one"}
LINE = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": ASKED}).encode()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder: Path = tmp_path_factory.mktemp("state")
    config = RouterConfig(
        local="pocket", store=folder / "answers.sqlite3", files=folder / "files", aliases={"gpt-4o": "local"}
    )
    with (
        serving(daemon_app(Router(config, tiers(ScriptedLocal(), config))), lifespan=True) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="mine", max_retries=0, _strict_response_validation=True) as client,
    ):
        yield client


def chat(client: openai.OpenAI) -> dict[str, Any]:
    return {"completion_id": client.chat.completions.create(**CHAT, store=True).id}


def response(client: openai.OpenAI, **options: Any) -> dict[str, Any]:
    return {"response_id": client.responses.create(**ASKED, **options).id}


def file(client: openai.OpenAI) -> dict[str, Any]:
    return {"file_id": client.files.create(file=("a.jsonl", LINE), purpose="batch").id}


def batch(client: openai.OpenAI) -> dict[str, Any]:
    return {"input_file_id": file(client)["file_id"], "endpoint": "/v1/responses", "completion_window": "24h"}


CALLS: dict[str, Given] = {
    "chat.completions.create": lambda _: {**CHAT, "logprobs": True, "top_logprobs": 1, "service_tier": "flex"},
    "chat.completions.list": lambda _: {"limit": 1, "order": "desc", "metadata": {"a": "b"}},
    "chat.completions.retrieve": chat,
    "chat.completions.update": lambda client: {**chat(client), "metadata": {"a": "b"}},
    "chat.completions.messages.list": lambda client: {**chat(client), "limit": 1, "order": "asc"},
    "chat.completions.delete": chat,
    "completions.create": lambda _: {**TEXT, "echo": True, "seed": 1, "user": "u"},
    "embeddings.create": lambda _: {**ASKED, "encoding_format": "float"},
    "models.list": lambda _: {},
    "models.retrieve": lambda _: {"model": "gpt-4o"},
    "responses.create": lambda _: {**ASKED, "top_logprobs": 1, "metadata": {"a": "b"}, "truncation": "auto"},
    "responses.retrieve": lambda client: {**response(client), "include": ["reasoning.encrypted_content"]},
    "responses.input_items.list": lambda client: {**response(client), "limit": 1, "order": "asc"},
    "responses.input_tokens.count": lambda _: {"input": "one", "instructions": "two"},
    "responses.cancel": lambda client: response(client, background=True),
    "responses.delete": response,
    "files.create": lambda _: {"file": b"data", "purpose": "user_data"},
    "files.list": lambda _: {"limit": 1, "order": "asc", "purpose": "batch"},
    "files.retrieve": file,
    "files.content": file,
    "files.delete": file,
    "batches.create": lambda client: {**batch(client), "metadata": {"a": "b"}},
    "batches.list": lambda _: {"limit": 1},
    "batches.retrieve": lambda client: {"batch_id": client.batches.create(**batch(client)).id},
}


@pytest.mark.parametrize("call", CALLS)
def test_the_answer_is_of_its_type(client: openai.OpenAI, call: str) -> None:
    path, _, name = call.rpartition(".")
    resource, given = attrgetter(path)(client), CALLS[call]
    plain = getattr(resource, name)(**given(client))
    raw = getattr(resource.with_raw_response, name)(**given(client))
    assert raw.headers["x-request-id"] and isinstance(raw.parse(), type(plain))
    with getattr(resource.with_streaming_response, name)(**given(client)) as streaming:
        assert streaming.status_code == 200 and streaming.read()


@pytest.mark.parametrize("call", ["chat.completions.create", "responses.create"])
def test_the_events_are_of_their_types(client: openai.OpenAI, call: str) -> None:
    path, _, name = call.rpartition(".")
    with getattr(attrgetter(path)(client), name)(**CALLS[call](client), stream=True) as stream:
        assert len(list(stream)) > 2
