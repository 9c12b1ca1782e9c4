"""The Responses API through the real openai client, over the SDK's transport and over the daemon's socket."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
import updraft
from openai.types.responses import Response, ResponseItemList
from router_fakes import CLOUD_TEXT, LOCAL_TEXT, FakeCloud, ScriptedGates, ScriptedLocal, tiers
from scripted_cloud import cloud_says, cloud_streams
from serving import serving
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from waiting import wait_for

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture
def config(cloud: FakeCloud, tmp_path: Path) -> RouterConfig:
    return RouterConfig(
        local="pocket", cloud_url=cloud.url, cloud_model="pocket-large", store=tmp_path / "answers.sqlite3"
    )


@contextmanager
def a_client(over: str, config: RouterConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[openai.OpenAI]:
    async def load(config: RouterConfig) -> Any:
        return tiers(ScriptedLocal(), config, ScriptedGates())

    monkeypatch.setattr("updraft.router.router.load_tiers", load)
    if over == "transport":
        with updraft.OpenAI(config=config, max_retries=0) as client:
            yield client
        return
    with (
        serving(daemon_app(Router(config)), lifespan=True) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="mine", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(params=["transport", "daemon"])
def client(
    request: pytest.FixtureRequest, config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> Iterator[openai.OpenAI]:
    with a_client(request.param, config, monkeypatch) as client:
        yield client


def checked(response: Response) -> Response:
    """The response, which is one as openai's own types want it."""
    Response.model_validate(response.to_dict())
    return response


def streamed(client: openai.OpenAI, **options: Any) -> list[Any]:
    """The events, each checked against its type, numbered through."""
    events = list(client.responses.create(input="hello", stream=True, **options))
    for event in events:
        type(event).model_validate(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def test_a_response_with_its_reason(client: openai.OpenAI) -> None:
    raw = client.responses.with_raw_response.create(
        model="auto", input="hello", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5
    )
    response = checked(raw.parse())
    assert (response.status, response.output_text) == ("completed", LOCAL_TEXT)
    assert (response.model, response.instructions, response.metadata) == ("fake-small", "Be brief.", {"a": "b"})
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (7, 6, 13)
    assert response.model_extra and response.model_extra["updraft"]["route"] == "local"
    assert raw.headers["x-updraft-tier"] == "local"


def test_input_token_counts(client: openai.OpenAI) -> None:
    count = client.responses.input_tokens.count
    asked: dict[str, Any] = {"model": "auto", "input": "hello", "tools": [TOOL], "reasoning": {"effort": "high"}}
    assert count(**asked, truncation="auto").input_tokens == len("hello") + 1
    first = client.responses.create(model="local", input="one")
    said = count(input="two", instructions="Be brief.", previous_response_id=first.id)
    assert said.input_tokens == sum(len(text) + 1 for text in ("Be brief.", "one", LOCAL_TEXT, "two"))
    with pytest.raises(openai.BadRequestError, match="input is required"):
        count()


def test_optional_and_ignored_fields(client: openai.OpenAI) -> None:
    assert client.responses.create(instructions="Say hello.").output_text
    tool: Any = {**TOOL, "allowed_callers": ["direct"], "defer_loading": False}
    hints: dict[str, Any] = {"prompt_cache_retention": "24h", "service_tier": "flex", "stream_options": {}}
    hints["include"] = ["file_search_call.results", "reasoning.encrypted_content"]
    last = streamed(client, model="local", truncation="auto", tools=[tool], tool_choice="none", **hints)[-1]
    assert (last.response.output_text, last.response.truncation) == (LOCAL_TEXT, "disabled")
    with pytest.raises(openai.BadRequestError, match="prompt") as caught:
        client.responses.create(input="hello", prompt={"id": "pmpt_1"})
    assert caught.value.code in ("unsupported_parameter", "invalid_value")


def test_the_events_of_a_text(client: openai.OpenAI) -> None:
    for model, text in (("local", LOCAL_TEXT), ("cloud", CLOUD_TEXT)):
        events = streamed(client, model=model)
        assert [event.type for event in events if not event.type.endswith(".delta")] == TEXT_EVENTS
        assert "".join(event.delta for event in events if event.type.endswith(".delta")) == text
        last = checked(events[-1].response)
        assert last.output_text == text
        assert last.usage is not None and last.model_extra and last.model_extra["updraft"]["tier"] == model
        assert events[0].response.output == []


@pytest.mark.parametrize("model", ["local", "cloud"])
def test_the_effective_values_are_reported(client: openai.OpenAI, model: str) -> None:
    """All fields that Open Responses requires, with the values that were used."""
    tools: Any = [{"type": "function", "name": "weather"}]
    sampling: Any = {"temperature": 0.0, "extra_body": {"top_k": 3, "presence_penalty": 0.5}}
    said = client.responses.create(
        model=model, input="hello", service_tier="flex", tools=tools, tool_choice="none", **sampling
    )
    response = checked(said).to_dict()
    assert response["tools"] == [{**tools[0], "description": None, "parameters": None, "strict": False}]
    used = (0.25, 0.95) if model == "local" else (0.0, 1.0)  # the device reports its values
    assert (response["temperature"], response["top_p"]) == used
    assert (response["presence_penalty"], response["frequency_penalty"]) == (0.5, 0.0)
    assert (response["service_tier"], response["top_logprobs"], response["conversation"]) == ("default", 0, None)
    last = streamed(client, model=model, **sampling)[-1].response
    assert (last.temperature, last.top_p, last.service_tier, last.presence_penalty) == (*used, "default", 0.5)


def test_the_service_tier_of_the_cloud(client: openai.OpenAI, cloud: FakeCloud) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    cloud.says = (200, json.dumps({"model": "m", "service_tier": "priority", "choices": [choice]}).encode())
    assert client.responses.create(model="cloud", input="hello").service_tier == "priority"


def test_a_required_choice_needs_a_function(client: openai.OpenAI, cloud: FakeCloud) -> None:
    for tools in ([{"type": "web_search"}], []):
        with pytest.raises(openai.BadRequestError, match="functions to choose from") as caught:
            client.responses.create(model="cloud", input="x", tools=tools, tool_choice="required")  # pyright: ignore
        assert caught.value.param == "tool_choice"
    assert not cloud.requests


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model="cloud", input="hello") as stream:
        assert stream.get_final_response().output_text == CLOUD_TEXT


def test_a_format_and_the_fields_that_a_chat_has(client: openai.OpenAI, cloud: FakeCloud) -> None:
    class Greeting(pydantic.BaseModel):
        word: str

    cloud_says(cloud, {"content": '{"word": "hi"}'})
    parsed = client.responses.parse(
        model="cloud", input="hello", text_format=Greeting, max_output_tokens=9, reasoning={"effort": "low"}, user="u"
    )
    assert parsed.output_parsed == Greeting(word="hi")
    sent = cloud.requests[-1]
    assert sent["response_format"]["json_schema"]["name"] == "Greeting"
    assert (sent["max_completion_tokens"], sent["reasoning_effort"], sent["user"]) == (9, "low", "u")
    assert not {"store", "metadata", "input"} & set(sent)


def test_a_round_trip_of_tools_and_reasoning(client: openai.OpenAI, cloud: FakeCloud) -> None:
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        for number in (1, 2)
    ]
    cloud_says(cloud, {"content": None, "reasoning_content": "Hm.", "tool_calls": calls}, "tool_calls")
    asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]}]
    options: dict[str, Any] = {
        "model": "cloud",
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "weather"},
    }
    response = checked(client.responses.create(input=asked, store=False, **options))
    assert [item.type for item in response.output] == ["reasoning", "function_call", "function_call"]
    assert cloud.requests[-1]["tool_choice"]["function"] == {"name": "weather"}
    cloud.says = None
    said: list[Any] = [item.to_dict() for item in response.output]
    outputs: list[Any] = [{"type": "function_call_output", "call_id": call["id"], "output": "dry"} for call in calls]
    final = client.responses.create(input=[*asked, *said, *outputs], **options)
    assert final.output_text == CLOUD_TEXT
    assert cloud.requests[-1]["messages"] == [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "dry"},
        {"role": "tool", "tool_call_id": "call_2", "content": "dry"},
    ]


def test_the_events_of_reasoning_and_calls(client: openai.OpenAI, cloud: FakeCloud) -> None:
    cloud_streams(
        cloud,
        {"reasoning_content": "Hm"},
        {"reasoning_content": "."},
        {"content": "Let me see."},
        {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        finish_reason="tool_calls",
    )
    events = streamed(client, model="cloud", tools=[TOOL])
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds.index("reasoning_text.done") < kinds.index("output_text.delta")
    assert kinds.index("output_text.done") < kinds.index("function_call_arguments.delta")
    assert [event.delta for event in events if "arguments.delta" in event.type] == ['{"a":', "1}"]
    response = checked(events[-1].response)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output[2].to_dict()["arguments"] == '{"a":1}'
    assert all(item.to_dict()["status"] == "completed" for item in response.output)


def test_ends_of_an_answer(client: openai.OpenAI, cloud: FakeCloud) -> None:
    cut = streamed(client, model="local", max_output_tokens=2)[-1]
    assert (cut.type, cut.response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")
    assert cut.response.output[0].status == "incomplete"
    cloud_says(cloud, {"content": None, "refusal": "No."})
    refused = checked(client.responses.create(model="cloud", input="hello"))
    assert refused.output[0].to_dict()["content"] == [{"type": "refusal", "refusal": "No."}]
    cloud.says, cloud.mode = None, "cut"
    failed = streamed(client, model="cloud")[-1]
    assert (failed.type, failed.response.error.code) == ("response.failed", "server_error")
    cloud.mode = "400"
    with pytest.raises(openai.BadRequestError, match="cloud error 400"):
        client.responses.create(model="cloud", input="hello", stream=True)


def test_a_stream_that_is_left_stops_the_cloud(client: openai.OpenAI, cloud: FakeCloud) -> None:
    cloud.mode = "hang"
    with client.responses.create(model="cloud", input="hello", stream=True) as stream:
        assert next(iter(stream)).type == "response.created"
    wait_for(lambda: cloud.disconnects)


def test_the_async_client(config: RouterConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(config: RouterConfig) -> Any:
        return tiers(ScriptedLocal(), config, ScriptedGates())

    async def go() -> None:
        async with updraft.AsyncOpenAI(config=config, max_retries=0) as client:
            made = await client.responses.create(model="local", input="hello")
            assert (await client.responses.retrieve(made.id)).output_text == made.output_text == LOCAL_TEXT
            stream = await client.responses.create(
                model="cloud", input="more", previous_response_id=made.id, stream=True
            )
            assert [event.type async for event in stream][-1] == "response.completed"
            assert [item.type async for item in client.responses.input_items.list(made.id)] == ["message"]
            await client.responses.delete(made.id)
            chat = await client.chat.completions.create(
                model="local", messages=[{"role": "user", "content": "hello"}], store=True
            )
            assert [each.id async for each in client.chat.completions.list()] == [chat.id]

    monkeypatch.setattr("updraft.router.router.load_tiers", load)
    asyncio.run(go())


def test_without_a_store_nothing_can_be_found(
    config: RouterConfig, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = RouterConfig(local="pocket", cloud_url=cloud.url, cloud_model="pocket-large")
    with a_client("transport", off, monkeypatch) as client:
        response = client.responses.create(model="local", input="hello")
        assert response.model_extra and response.model_extra["store"] is False
        for attempt in (
            lambda: client.responses.create(model="local", input="hello", previous_response_id=response.id),
            lambda: client.responses.retrieve(response.id),
            client.chat.completions.list,
        ):
            with pytest.raises(openai.NotFoundError, match="store = true"):
                attempt()
        for options in ({"store": True}, {"background": True}):
            with pytest.raises(openai.BadRequestError, match="store = true"):
                client.responses.create(model="local", input="hello", **options)  # pyright: ignore


def test_a_conversation_that_is_stored(client: openai.OpenAI, cloud: FakeCloud) -> None:
    first = client.responses.create(model="local", input="one", instructions="Not carried over.")
    second = client.responses.create(
        model="cloud",
        input=[{"type": "item_reference", "id": first.output[0].id or ""}, {"role": "user", "content": "two"}],
        previous_response_id=first.id,
        stream=True,
    )
    last = list(second)[-1].response  # pyright: ignore
    assert [message["content"] for message in cloud.requests[-1]["messages"]] == ["one", LOCAL_TEXT, LOCAL_TEXT, "two"]
    assert checked(client.responses.retrieve(last.id)).to_dict() == last.to_dict()
    for stream in ("false", "0"):
        assert client.get(f"/responses/{last.id}?stream={stream}", cast_to=object) == last.to_dict()
    with pytest.raises(openai.BadRequestError, match="stream must be true or false"):
        client.get(f"/responses/{last.id}?stream=perhaps", cast_to=object)
    ResponseItemList.model_validate(client.get(f"/responses/{last.id}/input_items", cast_to=object))
    items = [item.to_dict() for item in client.responses.input_items.list(last.id, limit=1, order="asc")]
    assert [item["role"] for item in items] == ["user", "assistant", "assistant", "user"]
    (newest,) = client.responses.input_items.list(last.id, limit=1).data
    content: Any = newest.to_dict()["content"]
    assert content[0]["text"] == "two"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="background=true"):
        client.responses.cancel(last.id)


def test_a_key_sees_its_own_responses_alone(config: RouterConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_client("daemon", config, monkeypatch) as mine:
        made = mine.responses.create(model="local", input="hello")
        other = mine.with_options(api_key="other")
        for attempt in (
            lambda: other.responses.retrieve(made.id),
            lambda: other.responses.delete(made.id),
            lambda: other.responses.create(model="local", input="x", previous_response_id=made.id),
        ):
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                attempt()
        assert mine.responses.retrieve(made.id).output_text == LOCAL_TEXT


def test_a_response_in_the_background(client: openai.OpenAI) -> None:
    begun = checked(client.responses.create(model="local", input="hello", background=True))
    assert begun.status in ("queued", "in_progress")
    made = _finished(client, begun.id)
    assert (made.status, made.output_text) == ("completed", LOCAL_TEXT)
    assert client.responses.cancel(begun.id).status == "completed"
    with pytest.raises(openai.BadRequestError, match="can be streamed"):
        client.responses.retrieve(begun.id, stream=True)


def test_a_stream_in_the_background_can_be_taken_up_again(client: openai.OpenAI) -> None:
    events = streamed(client, model="cloud", background=True)
    response_id = events[-1].response.id
    _finished(client, response_id)
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=2))
    assert [event.to_dict() for event in rest] == [event.to_dict() for event in events[3:]]


def test_a_response_in_the_background_is_cancelled(client: openai.OpenAI, cloud: FakeCloud) -> None:
    cloud.mode = "slow"
    begun = client.responses.create(model="cloud", input="hello", background=True)
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert checked(client.responses.retrieve(begun.id)).status == "cancelled"
    doomed = client.responses.create(model="cloud", input="hello", background=True)
    client.responses.delete(doomed.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(doomed.id)


def test_a_response_that_is_not_complete_is_not_gone_on_from(client: openai.OpenAI, cloud: FakeCloud) -> None:
    cloud.mode = "slow"
    begun = client.responses.create(model="cloud", input="hello", background=True)
    with pytest.raises(openai.BadRequestError, match="still running"):
        client.responses.create(model="local", input="go on", previous_response_id=begun.id)


def test_a_background_response_may_fail(client: openai.OpenAI, cloud: FakeCloud) -> None:
    cloud.mode = "400"
    failed = _finished(client, client.responses.create(model="cloud", input="hello", background=True).id)
    assert failed.error is not None
    assert (failed.status, failed.error.message) == ("failed", "cloud error 400")


def _finished(client: openai.OpenAI, response_id: str) -> Response:
    for _ in range(2000):
        response = client.responses.retrieve(response_id)
        if response.status not in ("queued", "in_progress"):
            return response
    raise AssertionError("it does not end")


def test_an_answer_that_could_not_be_stored_says_so(client: openai.OpenAI, config: RouterConfig) -> None:
    assert client.responses.create(input="hello", model="local").to_dict()["store"]
    with closing(sqlite3.connect(str(config.store))) as file:
        file.execute("DROP TABLE answers")
    whole = checked(client.responses.create(input="hello", model="local"))
    for made in (whole, streamed(client, model="local")[-1].response):
        response: Any = made.to_dict()
        assert (made.output_text, response["status"], response["store"]) == (whole.output_text, "completed", False)
        assert response["updraft"]["notes"] == ["store: this answer could not be stored"]
