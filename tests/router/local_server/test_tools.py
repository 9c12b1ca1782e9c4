"""Tools and begun messages at a model server as the local tier: passed on in its own shape, and taken back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import updraft
from router_fakes import CLOUD_TEXT, FakeCloud
from scripted_provider import TOOL, ScriptedProvider, events, running_provider
from updraft.router.config import RouterConfig

USER: list[Any] = [{"role": "user", "content": "Oslo and Rome?"}]
SURE = {"content": [{"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": []}]}
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}], "usage": {"prompt_tokens": 3}}


@pytest.fixture
def server() -> Iterator[ScriptedProvider]:
    with running_provider() as provider:
        provider.says({"data": [{"id": "small", "max_model_len": 512}]})
        provider.says({"choices": [{"message": {"content": "a"}, "logprobs": SURE}]})
        yield provider


def piece(index: int, arguments: str, **call: Any) -> dict[str, Any]:
    """A chunk with more of a call."""
    function = {"arguments": arguments, **({"name": "weather"} if call else {})}
    delta = {"tool_calls": [{"index": index, "function": function, **call}]}
    return {"choices": [{"index": 0, "delta": delta, "logprobs": SURE, "finish_reason": None}]}


def said(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "logprobs": SURE, "finish_reason": finish}]}


TWO = events(
    said("I look."),
    piece(0, "", id="a", type="function"),
    piece(1, '{"city"', id="b", type="function"),
    piece(0, '{"city": "Os'),
    piece(1, ': "Rome"}'),
    piece(0, 'lo"}'),
    END,
)


def test_a_round_trip_with_calls_whose_pieces_alternate(server: ScriptedProvider) -> None:
    asked: dict[str, Any] = {"model": "local", "tools": [TOOL]}
    with updraft.OpenAI(config=RouterConfig(local=server.url)) as client:
        server.says(TWO)
        choice = client.chat.completions.create(messages=USER, tool_choice="required", **asked).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        calls = choice.message.tool_calls or []
        assert [call.to_dict()["function"] for call in calls] == [
            {"name": "weather", "arguments": '{"city": "Oslo"}'},
            {"name": "weather", "arguments": '{"city": "Rome"}'},
        ]
        sent = server.asked[-1].body
        assert (sent["tools"], sent["tool_choice"]) == ([TOOL], "required")
        server.says(TWO)
        streamed: dict[int, str] = {}
        for chunk in client.chat.completions.create(messages=USER, stream=True, **asked):
            for part in chunk.choices[0].delta.tool_calls or ():
                name = part.function.arguments if part.function else None
                streamed[part.index] = streamed.get(part.index, "") + (name or "")
        assert streamed == {0: '{"city": "Oslo"}', 1: '{"city": "Rome"}'}
        server.says(events(said("Rain.", "stop")))
        results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
        history = [*USER, choice.message.model_dump(exclude_none=True), *results]
        assert client.chat.completions.create(messages=history, **asked).choices[0].message.content == "Rain."
        turns = server.asked[-1].body["messages"]
        assert [call["id"] for call in turns[1]["tool_calls"]] == [turn["tool_call_id"] for turn in turns[2:]]
        assert turns[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}


def test_whole_calls_that_all_have_the_first_number(server: ScriptedProvider) -> None:
    """As some versions of Ollama send them; of one call where no more are wanted, the first."""
    calls = events(
        piece(0, '{"city": "Oslo"}', id="a", type="function"),
        piece(0, '{"city": "Rome"}', id="b", type="function"),
        END,
    )
    with updraft.OpenAI(config=RouterConfig(local=server.url)) as client:
        for parallel, count in ((True, 2), (False, 1)):
            server.says(calls)
            reply = client.chat.completions.create(
                model="local", messages=USER, tools=[TOOL], parallel_tool_calls=parallel
            )
            assert len(reply.choices[0].message.tool_calls or ()) == count
            assert server.asked[-1].body.get("parallel_tool_calls") == (None if parallel else False)


def test_an_answer_without_a_finish_reason_is_whole_with_the_end_mark(server: ScriptedProvider) -> None:
    asked: Any = {"model": "local", "messages": USER, "tools": [TOOL]}
    with updraft.OpenAI(config=RouterConfig(local=server.url), max_retries=0) as client:
        server.says(events(piece(0, {"city": "Oslo"}, id="a", type="function")) + "data: [DONE]\n\n")
        choice = client.chat.completions.create(**asked).choices[0]
        assert [call.to_dict()["function"]["arguments"] for call in choice.message.tool_calls or ()] == [
            '{"city":"Oslo"}'
        ]
        assert choice.finish_reason == "tool_calls"
        server.says(events(said("Oslo")))
        with pytest.raises(openai.APIStatusError, match="cut before its end"):
            client.chat.completions.create(**asked)


def test_text_like_a_call_and_calls_of_unknown_functions_stay_text(server: ScriptedProvider) -> None:
    quoted = '[TOOL_CALLS][{"name": "weather", "arguments": {}}]'
    unknown = {"index": 0, "id": "a", "type": "function", "function": {"name": "other", "arguments": "{}"}}
    called = {"choices": [{"index": 0, "delta": {"tool_calls": [unknown]}, "logprobs": SURE}]}
    shown = '[TOOL_CALLS][{"name":"other","arguments":"{}"}]'
    with updraft.OpenAI(config=RouterConfig(local=server.url)) as client:
        for answer, text in ((said(quoted), quoted), (called, shown)):
            server.says(events(answer, END))
            choice = client.chat.completions.create(model="local", messages=USER, tools=[TOOL]).choices[0]
            assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", text, None)


def test_a_choice_that_the_server_ignores_goes_to_the_cloud(server: ScriptedProvider, cloud: FakeCloud) -> None:
    config = RouterConfig(local=server.url, cloud_url=cloud.url, cloud_model="pocket-large")
    asked: dict[str, Any] = {"messages": USER, "tools": [TOOL], "tool_choice": "required"}
    with updraft.OpenAI(config=config, max_retries=0) as client:
        server.says(events(said("No.", "stop")))
        extra = {"updraft": {"confidence": 0.01}}
        reply = client.chat.completions.create(model="auto", extra_body=extra, **asked)
        assert reply.choices[0].message.content == CLOUD_TEXT
        server.says(events(said("No.", "stop")))
        with pytest.raises(openai.APIStatusError, match="made no tool call"):
            client.chat.completions.create(model="local", **asked)
        with pytest.raises(openai.BadRequestError, match="not supported with tools"):
            client.chat.completions.create(model="local", messages=USER, tools=[TOOL], logprobs=True)


def test_continued_message_drops_its_repeated_start(server: ScriptedProvider) -> None:
    begun = "The capital of Norway is"
    messages: list[Any] = [*USER, {"role": "assistant", "content": begun}]
    asked: dict[str, Any] = {
        "model": "local",
        "messages": messages,
        "extra_body": {"continue_final_message": True, "add_generation_prompt": False},
    }
    with updraft.OpenAI(config=RouterConfig(local=server.url)) as client:
        for pieces in ([" Oslo", "."], ["The capital of", " Norway is Oslo", "."]):
            server.says(events(*map(said, pieces), said("", "stop")))
            assert client.chat.completions.create(**asked).choices[0].message.content == " Oslo."
            assert server.asked[-1].body["messages"][-1] == {"role": "assistant", "content": begun}
            assert server.asked[-1].body["continue_final_message"] is True
        server.says(events(said("The capital of Sweden."), said("", "stop")))
        with pytest.raises(openai.BadRequestError, match="restarted the message"):
            client.chat.completions.create(**asked)
