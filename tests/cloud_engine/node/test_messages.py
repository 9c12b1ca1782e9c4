"""Anthropic's Messages API of a real node, through the real anthropic client: the same answer as its chat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

ASKED: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
ANSWER: Any = {**ASKED, "max_tokens": 8}
GREEDY: Any = {**ANSWER, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(nodes: list[str]) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=nodes[0], api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_messages_answer_equals_the_chat_answer(client: anthropic.Anthropic, nodes: list[str]) -> None:
    with openai.OpenAI(base_url=f"{nodes[0]}/v1", api_key="none", timeout=120) as chats:
        chat = chats.chat.completions.create(**ANSWER, temperature=0)
    whole = client.messages.create(**GREEDY)
    with client.messages.stream(**GREEDY) as stream:
        begun: Any = next(iter(stream))
        streamed = stream.get_final_message()
    assert begun.message.usage.input_tokens == client.messages.count_tokens(**ASKED).input_tokens
    for message in (whole, streamed):
        assert message.content[0].to_dict() == {"type": "text", "text": chat.choices[0].message.content}
        assert message.stop_reason == "max_tokens"
        assert chat.usage is not None and message.usage.output_tokens == chat.usage.completion_tokens
        read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
        assert read == chat.usage.prompt_tokens == client.messages.count_tokens(**ASKED).input_tokens


def test_the_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    text = client.messages.create(**GREEDY).content[0].to_dict()["text"]
    stop = text[2:4]
    whole = client.messages.create(**GREEDY, stop_sequences=[stop])
    with client.messages.stream(**GREEDY, stop_sequences=[stop]) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_errors_are_anthropics(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**{**GREEDY, "model": "other"})
    assert unknown.value.type == "not_found_error"
    picture: Any = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": [picture]}])
    assert refused.value.type == "invalid_request_error" and "Image input is not supported" in refused.value.message
