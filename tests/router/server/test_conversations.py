"""Conversations and compaction of the Responses API, through the real openai client over a daemon's socket."""

from __future__ import annotations

import base64
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.conversations import Conversation, ConversationItem
from openai.types.responses import CompactedResponse, Response
from pydantic import TypeAdapter
from router_fakes import CLOUD_TEXT, FakeCloud
from scripted_cloud import cloud_says
from serving import serving
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from updraft.router.storage.answer_store import AnswerStore

USER: Any = {"role": "user", "content": "one"}
CALL = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}


def serve(cloud: FakeCloud, store: Path | None) -> Any:
    config = RouterConfig(local=None, cloud_url=cloud.url, cloud_model="pocket-large", store=store)
    return serving(daemon_app(Router(config)), lifespan=True)


@pytest.fixture
def client(cloud: FakeCloud, tmp_path: Path) -> Iterator[openai.OpenAI]:
    with (
        serve(cloud, tmp_path / "answers.sqlite3") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="mine", max_retries=0) as client,
    ):
        yield client


def texts(cloud: FakeCloud) -> list[Any]:
    return [message["content"] for message in cloud.requests[-1]["messages"]]


def test_a_conversation_and_its_items(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(items=[USER], metadata={"a": "b"})
    Conversation.model_validate(conversation.to_dict())
    again = client.conversations.retrieve(conversation.id)
    assert (again.metadata, again.object, again.id[:5]) == ({"a": "b"}, "conversation", "conv_")
    added = client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "two"}])
    listed = client.conversations.items.list(conversation.id, order="asc").data
    for item in listed:
        TypeAdapter[Any](ConversationItem).validate_python(item.to_dict())
    assert [item.to_dict()["content"][0]["text"] for item in listed] == ["one", "two"]  # pyright: ignore
    item_id = added.data[0].id or ""
    assert client.conversations.items.retrieve(item_id, conversation_id=conversation.id).id == item_id
    client.conversations.items.delete(item_id, conversation_id=conversation.id)
    assert len(client.conversations.items.list(conversation.id).data) == 1
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.delete(item_id, conversation_id=conversation.id)
    assert client.conversations.update(conversation.id, metadata={"c": "d"}).metadata == {"c": "d"}
    with pytest.raises(openai.NotFoundError):
        client.with_options(api_key="other").conversations.retrieve(conversation.id)
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)
    with pytest.raises(openai.BadRequestError, match=r"items\[0\]"):
        client.conversations.create(items=[{"type": "item_reference", "id": "x"}])  # pyright: ignore


@pytest.mark.parametrize("stream", [False, True])
def test_responses_continue_a_conversation(client: openai.OpenAI, cloud: FakeCloud, stream: bool) -> None:
    conversation = client.conversations.create(items=[USER])
    if stream:
        with client.responses.stream(model="cloud", input="two", conversation=conversation.id) as events:
            response = events.get_final_response()
    else:
        response = client.responses.create(model="cloud", input="two", conversation=conversation.id)
    Response.model_validate(response.to_dict())
    assert response.conversation is not None and response.conversation.id == conversation.id
    client.responses.create(model="cloud", input="three", conversation={"id": conversation.id}, store=False)
    assert texts(cloud) == ["one", "two", CLOUD_TEXT, "three"]
    assert len(client.conversations.items.list(conversation.id).data) == 5
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(input="x", conversation=conversation.id, previous_response_id=response.id)
    with pytest.raises(openai.NotFoundError, match="conv_x"):
        client.responses.create(input="x", conversation="conv_x")


def test_a_failed_response_adds_nothing_to_its_conversation(client: openai.OpenAI, cloud: FakeCloud) -> None:
    conversation = client.conversations.create(items=[USER])
    cloud.mode = "400"
    with pytest.raises(openai.APIStatusError):
        client.responses.create(model="cloud", input="two", conversation=conversation.id)
    assert len(client.conversations.items.list(conversation.id).data) == 1


def test_without_a_store_there_are_no_conversations(cloud: FakeCloud) -> None:
    with serve(cloud, None) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="store = true"):
            client.conversations.create()
        with pytest.raises(openai.BadRequestError, match="store = true"):
            client.responses.create(input="x", conversation="conv_1")


def test_a_conversation_is_compacted_by_the_model(client: openai.OpenAI, cloud: FakeCloud) -> None:
    history: Any = [
        {"role": "user", "content": "The launch is on Tuesday."},
        {"role": "assistant", "content": "Noted."},
    ]
    cloud_says(cloud, {"content": "They launch on Tuesday."})
    compacted = client.responses.compact(model="cloud", input=history, instructions="Be brief.")
    CompactedResponse.model_validate(compacted.to_dict())
    assert texts(cloud)[:3] == ["Be brief.", "The launch is on Tuesday.", "Noted."]
    assert [item.type for item in compacted.output] == ["compaction"] and compacted.usage.total_tokens == 7
    cloud.says = None
    client.responses.create(model="cloud", input=[*compacted.to_dict()["output"], USER])  # pyright: ignore
    assert texts(cloud) == ["Summary of the conversation so far:\nThey launch on Tuesday.", "one"]
    with pytest.raises(openai.BadRequestError, match="model: is required"):
        client.post("/responses/compact", body={"input": "x"}, cast_to=object)
    cloud_says(cloud, {"content": ""})
    with pytest.raises(openai.InternalServerError, match="no summary"):
        client.responses.compact(model="cloud", input=history)


@pytest.mark.parametrize("stream", [False, True])
def test_long_conversations_are_compacted_on_request(client: openai.OpenAI, cloud: FakeCloud, stream: bool) -> None:
    manage: Any = {"context_management": [{"type": "compaction", "compact_threshold": 50}]}
    short = client.responses.create(model="cloud", input="short", **manage)
    assert [item.type for item in short.output] == ["message"] and len(cloud.requests) == 1
    assert "notes" not in short.to_dict()["updraft"]  # pyright: ignore
    history: Any = [{"role": "user", "content": "word " * 100}, {"role": "assistant", "content": "Hm."}, USER]
    options: Any = {"model": "cloud", "input": history, **manage}
    if stream:
        with client.responses.stream(**options) as events:
            kinds = [event.type for event in events]
            response = events.get_final_response()
        assert kinds[:4] == ["response.created", "response.in_progress"] + [
            f"response.output_item.{kind}" for kind in ("added", "done")
        ]
    else:
        response = client.responses.create(**options)
    Response.model_validate(response.to_dict())
    assert [item.type for item in response.output] == ["compaction", "message"]
    summary = f"Summary of the conversation so far:\n{CLOUD_TEXT}"
    assert texts(cloud) == [summary, "one"], "the last turn is kept as it is"
    client.responses.create(model="cloud", input="two", previous_response_id=response.id)
    assert texts(cloud) == [summary, "one", CLOUD_TEXT, "two"]


def test_a_model_that_cannot_summarize_still_answers(client: openai.OpenAI, cloud: FakeCloud) -> None:
    history: Any = [{"role": "user", "content": "word " * 100}, {"role": "assistant", "content": "Hm."}, USER]
    cloud_says(cloud, {"content": "", "tool_calls": []})
    manage: Any = {"context_management": [{"type": "compaction", "compact_threshold": 5}]}
    response = client.responses.create(model="cloud", input=history, **manage)
    assert [item.type for item in response.output] == ["message"]
    assert len(texts(cloud)) == 3
    cloud.says = (400, b'{"error": {"message": "no"}}')
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="cloud", input=history, **manage)


def test_an_answer_survives_a_conversation_that_cannot_be_changed(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    conversation = client.conversations.create(items=[USER])
    monkeypatch.setattr(AnswerStore, "change", fail)
    response: Any = client.responses.create(model="cloud", input="two", conversation=conversation.id)
    assert response.output_text == CLOUD_TEXT and response.model_extra["store"] is False
    assert "could not be stored" in str(response.model_extra["updraft"]["notes"])


@pytest.mark.parametrize(
    "content", ["updraft-1.!", "updraft-1.e30=", "updraft-1.W3sidHlwZSI6ICJpdGVtX3JlZmVyZW5jZSIsICJpZCI6ICJ4In1d"]
)
def test_a_compaction_that_was_changed_is_refused(client: openai.OpenAI, content: str) -> None:
    item: Any = {"type": "compaction", "encrypted_content": content}
    with pytest.raises(openai.BadRequestError, match=r"input\[0\].encrypted_content"):
        client.responses.create(model="cloud", input=[item, USER])


def test_a_compaction_inside_another_is_read(client: openai.OpenAI, cloud: FakeCloud) -> None:
    content = base64.b64encode(b'[{"role": "user", "content": "inner"}]').decode()
    for _ in range(2):
        nested = f'[{{"type": "compaction", "encrypted_content": "updraft-1.{content}"}}]'
        content = base64.b64encode(nested.encode()).decode()
    client.responses.create(model="cloud", input=[{"type": "compaction", "encrypted_content": f"updraft-1.{content}"}])
    assert texts(cloud) == ["inner"]


def test_outputs_of_unknown_calls_are_refused_within_a_conversation(client: openai.OpenAI, cloud: FakeCloud) -> None:
    conversation = client.conversations.create(items=[USER, CALL])  # pyright: ignore
    output: Any = {"type": "function_call_output", "call_id": "call_2", "output": "x"}
    with pytest.raises(openai.BadRequestError, match="no function call"):
        client.responses.create(model="cloud", input=[output], conversation=conversation.id)
    client.responses.create(model="cloud", input=[{**output, "call_id": "call_1"}], conversation=conversation.id)
    assert [message["role"] for message in cloud.requests[-1]["messages"]] == ["user", "assistant", "tool"]
