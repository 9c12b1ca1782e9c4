"""Libraries that people use, each in its own way: an answer, a stream, a tool or a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import KEY, Place
from interop_cloud import MODEL, TEXT

HELLO: Any = [{"role": "user", "content": "Hello"}]


def _openai(place: Place) -> Any:
    import openai

    return openai.OpenAI(base_url=place.url, api_key=place.key, http_client=place.clients.get("sync"))


def test_instructor(place: Place) -> None:
    instructor = pytest.importorskip("instructor")
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        people: int

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(_openai(place), mode=mode)
        completion = client.chat.completions.create(
            model=place.model, response_model=City, messages=[{"role": "user", "content": "It is 'Oslo'."}]
        )
        assert (completion.name, completion.people) == ("Oslo", 3)


def test_pydantic_ai(place: Place) -> None:
    pytest.importorskip("pydantic_ai")
    import openai
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    client = openai.AsyncOpenAI(base_url=place.url, api_key=place.key, http_client=place.clients.get("async"))
    agent = Agent(OpenAIChatModel(place.model, provider=OpenAIProvider(openai_client=client)))
    seen: list[tuple[str, int]] = []

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather in a city."""
        seen.append(("weather", len(city)))
        return "sunny"

    @agent.tool_plain
    def people(city: str) -> int:
        """The number of people who live there."""
        seen.append(("people", len(city)))
        return 700_000

    assert agent.run_sync("Tell me both of 'Oslo'.").output == TEXT
    assert sorted(seen) == [("people", 4), ("weather", 4)], "parallel calls came back, and their results went up"


def test_litellm(place: Place) -> None:
    litellm = pytest.importorskip("litellm")
    options = {"model": f"openai/{place.model}", "api_base": place.url, "api_key": place.key}
    if place.clients:
        options["client"] = _openai(place)
    assert litellm.completion(messages=HELLO, **options).choices[0].message.content == TEXT
    chunks = litellm.completion(messages=HELLO, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT


def test_llama_index(place: Place) -> None:
    pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=place.model,
        api_base=place.url,
        api_key=place.key,
        is_chat_model=True,
        http_client=place.clients.get("sync"),
    )
    assert model.chat([ChatMessage(role="user", content="Hello")]).message.content == TEXT
    assert "".join(part.delta or "" for part in model.stream_chat([ChatMessage(role="user", content="Hello")])) == TEXT


def test_llm(place: Place, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = pytest.importorskip("llm")
    if place.clients:
        pytest.skip("llm takes a URL, and no HTTP client")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: {place.model}\n  api_base: {place.url}\n  api_key_name: here\n"
    )
    assert llm.get_model("here").prompt("Hello", key=place.key).text() == TEXT


def test_trio(cloud_url: str, tmp_path: Any) -> None:
    trio = pytest.importorskip("trio")
    import updraft
    from updraft.router.config import RouterConfig

    async def ask() -> None:
        config = RouterConfig(cloud_url=cloud_url, cloud_model=MODEL, ledger=tmp_path / "ledger.sqlite3")
        async with updraft.AsyncOpenAI(config=config) as client:
            stream = await client.chat.completions.create(model="auto", messages=HELLO, stream=True)
            assert "".join([part.choices[0].delta.content or "" async for part in stream if part.choices]) == TEXT
            assert (await client.responses.create(model="auto", input="Hello")).output_text == TEXT

    trio.run(ask)


def test_anthropic(daemon: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=daemon.removesuffix("/v1"), api_key=KEY, max_retries=0)
    message = client.messages.create(model="auto", max_tokens=50, messages=HELLO)
    assert message.content[0].text == TEXT
    with client.messages.stream(model="auto", max_tokens=50, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == TEXT
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    options: Any = {
        "model": "auto",
        "max_tokens": 50,
        "tools": [{"name": name, "input_schema": schema} for name in ("weather", "people")],
    }
    turns: Any = [{"role": "user", "content": "Tell me both of 'Oslo'."}]
    with client.messages.stream(messages=turns, **options) as stream:
        called = stream.get_final_message()
    calls = [part for part in called.content if part.type == "tool_use"]
    assert [(part.name, part.input) for part in calls] == [("weather", {"city": "Oslo"}), ("people", {"city": "Oslo"})]
    results = [{"type": "tool_result", "tool_use_id": part.id, "content": "3"} for part in calls]
    turns += [{"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    assert client.messages.create(messages=turns, **options).content[0].text == TEXT
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody's", max_tokens=50, messages=HELLO)


def test_ollama(daemon: str) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=daemon.removesuffix("/v1"))
    assert client.chat(model="auto", messages=HELLO).message.content == TEXT
    parts = client.chat(model="auto", messages=HELLO, stream=True)
    assert "".join(part.message.content or "" for part in parts) == TEXT
    assert client.generate(model="auto", prompt="Hello").response == TEXT
    assert client.embed(model="cloud", input="Hello").embeddings == [[5.0, 1.0]]
    assert client.embeddings(model="cloud", prompt="Hello").embedding == [5.0, 1.0]
    assert "completion" in (client.show("auto").capabilities or ())
    assert client.ps().models is not None
    for refused in (lambda: client.pull("llama3"), lambda: client.delete("auto")):
        with pytest.raises(ollama.ResponseError, match="updraft") as caught:
            refused()
        assert caught.value.status_code == 400
    assert "auto" in [each.model for each in client.list().models]
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    called = client.chat(model="auto", messages=HELLO, tools=[tool]).message
    assert called.tool_calls and called.tool_calls[0].function.name == "weather"
    with pytest.raises(ollama.ResponseError, match="nobody's"):
        client.chat(model="nobody's", messages=HELLO)


def test_anthropic_and_openai_at_a_node(node: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    import openai

    client = anthropic.Anthropic(base_url=node.removesuffix("/v1"), api_key=KEY, max_retries=0)
    model = client.models.list().data[0].id
    asked: Any = {"model": model, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
    message = client.messages.create(max_tokens=20, extra_body={"temperature": 0}, **asked)
    with client.messages.stream(max_tokens=20, extra_body={"temperature": 0}, **asked) as stream:
        assert "".join(stream.text_stream) == message.content[0].text
    assert client.messages.count_tokens(**asked).input_tokens == message.usage.input_tokens > 0
    with openai.OpenAI(base_url=node, api_key=KEY, max_retries=0) as other:
        answer = other.chat.completions.create(max_tokens=20, temperature=0, **asked)
        response = other.responses.create(model=model, input="What is 17 + 25?", max_output_tokens=20, temperature=0)
    assert answer.choices[0].message.content == response.output_text == message.content[0].text


def test_openai_responses(place: Place) -> None:
    if place.name == "gateway":
        pytest.skip("the scripted cloud has no Responses API for a gateway to relay to")
    assert _openai(place).responses.create(model=place.model, input="Hello").output_text == TEXT
    with _openai(place).responses.stream(model=place.model, input="Hello") as stream:
        assert json.loads(stream.get_final_response().model_dump_json())["status"] == "completed"
