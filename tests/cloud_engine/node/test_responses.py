"""The Responses API of a real node, through the real openai client: the same answer as its chat, and no memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import CompactedResponse, Response
from updraft.protocol.dialects.responses_items import since_compaction


@pytest.fixture(scope="module")
def client(nodes: list[str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{nodes[0]}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_responses_answer_equals_the_chat_answer(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=8, temperature=0
    )
    options: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**options, top_logprobs=1)
    Response.model_validate(whole.to_dict())
    events = list(client.responses.create(**options, stream=True))
    last: Any = events[-1]
    assert whole.output_text == last.response.output_text == chat.choices[0].message.content
    assert whole.usage is not None and chat.usage is not None
    assert whole.usage.total_tokens == last.response.usage.total_tokens == chat.usage.total_tokens
    assert len(whole.output[0].to_dict()["content"][0]["logprobs"]) == chat.usage.completion_tokens  # pyright: ignore
    counted = client.responses.input_tokens.count(model="tiny", input="hi", text={"verbosity": "low"})
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_hints_have_notes(client: openai.OpenAI) -> None:
    hints: Any = {"tools": [{"type": "web_search"}], "reasoning": {"summary": "detailed", "effort": "low"}}
    hints["context_management"] = [{"type": "compaction", "compact_threshold": 1}]
    response = client.responses.create(model="tiny", input="hi", max_output_tokens=4, **hints)
    assert response.model_extra
    notes = [note.partition(":")[0] for note in response.model_extra["updraft"]["notes"]]
    assert notes == ["reasoning.summary", "tools[0]", "context_management", "reasoning.effort"]


def test_a_conversation_is_compacted(client: openai.OpenAI) -> None:
    compacted = client.responses.compact(model="tiny", input="hi")
    CompactedResponse.model_validate(compacted.to_dict())
    assert compacted.usage.output_tokens > 0
    items: Any = since_compaction(compacted.to_dict()["output"])  # pyright: ignore
    assert items[0]["content"][0]["text"].startswith("Summary of the conversation so far:\n")
    with pytest.raises(openai.BadRequestError, match="model: is required"):
        client.post("/responses/compact", body={"input": "hi"}, cast_to=object)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"model": "other"}, "model"),
    ],
)
def test_stateful_requests_are_refused(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(**{"model": "tiny", "input": "hi", **options})
    assert caught.value.param == param
