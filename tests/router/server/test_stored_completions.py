"""Stored chat completions through the real openai client: made with `store`, listed, changed and deleted."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
import updraft
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion_store_message import ChatCompletionStoreMessage
from router_fakes import LOCAL_TEXT, FakeCloud, ScriptedGates, ScriptedLocal, tiers
from updraft.router.config import RouterConfig

USER: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def config(cloud: FakeCloud, tmp_path: Path) -> RouterConfig:
    return RouterConfig(
        local="pocket", cloud_url=cloud.url, cloud_model="pocket-large", store=tmp_path / "answers.sqlite3"
    )


@pytest.fixture
def client(config: RouterConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[updraft.OpenAI]:
    async def load(config: RouterConfig) -> Any:
        return tiers(ScriptedLocal(), config, ScriptedGates())

    monkeypatch.setattr("updraft.router.router.load_tiers", load)
    with updraft.OpenAI(config=config, max_retries=0) as client:
        yield client


def test_create_list_retrieve_update_delete(client: updraft.OpenAI) -> None:
    made = [
        client.chat.completions.create(model="local", messages=USER, store=True, metadata={"number": str(number)})
        for number in range(3)
    ]
    client.chat.completions.create(model="local", messages=USER)
    ids = [completion.id for completion in made]
    assert [each.id for each in client.chat.completions.list(limit=2)] == ids
    assert [each.id for each in client.chat.completions.list(order="desc", limit=1)] == ids[::-1]
    assert [each.id for each in client.chat.completions.list(metadata={"number": "1"})] == [ids[1]]
    stored = client.chat.completions.retrieve(ids[0])
    ChatCompletion.model_validate(stored.to_dict())
    assert stored.to_dict() == made[0].to_dict()
    assert stored.choices[0].message.content == LOCAL_TEXT
    changed = client.chat.completions.update(ids[0], metadata={"a": "b"})
    assert changed.to_dict()["metadata"] == {"a": "b"}
    assert [each.id for each in client.chat.completions.list(metadata={"a": "b"})] == [ids[0]]
    assert client.chat.completions.delete(ids[0]).deleted
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.retrieve(ids[0])


def test_a_stream_is_stored_whole(client: updraft.OpenAI, cloud: FakeCloud) -> None:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":'}}
    more = {"index": 0, "function": {"arguments": "1}"}}
    frame = {"id": "cloud-7", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices: list[dict[str, Any]] = [{"index": 0, "delta": {"tool_calls": [each]}} for each in (call, more)]
    choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    events = [b"data: " + json.dumps({**frame, "choices": [choice]}).encode() + b"\n\n" for choice in choices]
    cloud.says = (200, b"".join(events) + b"data: [DONE]\n\n")
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, *USER]
    asked: dict[str, Any] = {"model": "cloud", "messages": parts, "store": True, "metadata": {"a": "b"}}
    (completion_id,) = {chunk.id for chunk in client.chat.completions.create(**asked, stream=True)}
    assert not {"store", "metadata"} & set(cloud.requests[-1]), "the cloud is not asked to keep it, too"
    stored = client.chat.completions.retrieve(completion_id)
    calls = stored.choices[0].message.tool_calls
    assert calls is not None and calls[0].to_dict()["function"] == {"name": "f", "arguments": '{"a":1}'}
    messages = list(client.chat.completions.messages.list(completion_id, limit=1))
    ChatCompletionStoreMessage.model_validate({**messages[0].to_dict(), "role": "assistant"})
    assert [(each.content, bool(each.content_parts)) for each in messages] == [(None, True), ("hello", False)]


def test_a_completion_that_could_not_be_stored_says_so(client: updraft.OpenAI, config: RouterConfig) -> None:
    asked: dict[str, Any] = {"model": "local", "messages": USER, "store": True}
    whole = client.chat.completions.create(**asked)
    with closing(sqlite3.connect(str(config.store))) as file:
        file.execute("DROP TABLE answers")
    note = "store: this answer could not be stored"
    told: Any = client.chat.completions.create(**asked).to_dict()
    assert (told["choices"][0]["message"]["content"], told["updraft"]["notes"]) == (LOCAL_TEXT, [note])
    options = {"include_usage": True}
    chunks: list[Any] = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    assert [chunk.to_dict()["updraft"]["notes"] for chunk in chunks if chunk.model_extra] == [[note]]
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_no_answer_takes_the_place_of_another_with_the_same_id(
    client: updraft.OpenAI, cloud: FakeCloud, stream: bool
) -> None:
    """Servers exist whose ids are short, or always the same."""
    asked: dict[str, Any] = {"model": "cloud", "messages": USER, "store": True}
    ids: list[str] = []
    for number in range(2):
        told = client.chat.completions.create(**asked, metadata={"number": str(number)}, stream=stream)
        last: Any = [chunk for chunk in told if chunk.model_extra][-1] if stream else told
        assert "notes" not in last.to_dict()["updraft"]
        ids.append(last.id)
    stored = [client.chat.completions.retrieve(each).to_dict()["metadata"] for each in ids]
    assert stored == [{"number": "0"}, {"number": "1"}]


def test_an_answer_of_a_model_that_no_file_can_name_is_answered(client: updraft.OpenAI, cloud: FakeCloud) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
    cloud.says = (200, json.dumps({"id": "a", "model": "\ud83d", "choices": [choice]}).encode())
    told: Any = client.chat.completions.create(model="cloud", messages=USER, store=True)
    assert told.choices[0].message.content == "Hi"
    assert told.updraft["notes"] == ["store: this answer could not be stored"]


def test_a_stream_that_failed_is_not_stored(client: updraft.OpenAI, cloud: FakeCloud) -> None:
    cloud.mode = "cut"
    with pytest.raises(openai.APIError):
        list(client.chat.completions.create(model="cloud", messages=USER, store=True, stream=True))
    assert list(client.chat.completions.list()) == []


@pytest.mark.parametrize(
    ("path", "param"), [("limit=0", "limit"), ("order=up", "order"), ("odd=1", "odd"), ("after=none", None)]
)
def test_odd_queries_are_refused(client: updraft.OpenAI, path: str, param: str | None) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.get(f"/chat/completions?{path}", cast_to=object)
    assert (caught.value.status_code, caught.value.param) == (404 if param is None else 400, param)


def test_metadata_beyond_openais_limits_is_kept_in_part(client: updraft.OpenAI) -> None:
    metadata: Any = {"a": "b", "long": "v" * 513, "number": 1}
    told: Any = client.chat.completions.create(model="local", messages=USER, store=True, metadata=metadata)
    assert told.updraft["notes"][0].startswith("metadata: kept in part, metadata holds at most 16 texts")
    assert told.metadata == client.chat.completions.retrieve(told.id).to_dict()["metadata"] == {"a": "b"}
    with pytest.raises(openai.BadRequestError, match="metadata holds at most 16 texts"):
        client.chat.completions.update(told.id, metadata={"k": "v" * 513})
