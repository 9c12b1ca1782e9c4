"""The openai client, of whichever version is installed, against a cloud that answers with every optional field.

Over our transport in process and over the daemon's port; nothing of an answer is lost, and all of it is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pydantic
import pytest
import updraft
from full_cloud import FullCloud, running_full_cloud
from router_fakes import LOCAL_TEXT, ScriptedLocal, tiers
from serving import serving
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app

USER: Any = {"role": "user", "content": "hello"}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
Connect = Callable[..., openai.OpenAI]


class City(pydantic.BaseModel):
    city: str


@pytest.fixture
def cloud() -> Iterator[FullCloud]:
    with running_full_cloud() as cloud:
        yield cloud


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> ScriptedLocal:
    """The device's tier, where a router loads one."""
    local = ScriptedLocal()

    async def load(config: RouterConfig) -> Any:
        return tiers(local, config)

    monkeypatch.setattr("updraft.router.router.load_tiers", load)
    return local


@pytest.fixture(params=["in process", "daemon"])
def connect(request: pytest.FixtureRequest, cloud: FullCloud, local: ScriptedLocal) -> Iterator[Connect]:
    config = RouterConfig(cloud_url=cloud.url, cloud_model="big", cloud_api_key="cloud-key", ledger=None)
    with ExitStack() as stack:

        def connected(**options: Any) -> openai.OpenAI:
            if request.param == "daemon":
                url = stack.enter_context(serving(daemon_app(Router(config)), lifespan=True))
                client = openai.OpenAI(base_url=f"{url}/v1", api_key="app-key", max_retries=0, **options)
            else:
                client = updraft.OpenAI(config=config, max_retries=0, **options)
            return stack.enter_context(client)

        yield connected


def test_every_field_of_an_answer_arrives_and_goes_back(connect: Connect, cloud: FullCloud) -> None:
    client = connect()
    first = client.chat.completions.create(model="cloud", messages=[USER])
    message = first.choices[0].message
    assert message.annotations and message.model_extra["reasoning_content"] == "Hm."
    assert (first.service_tier, first.system_fingerprint) == ("default", "fp_1")
    assert first.usage.completion_tokens_details.reasoning_tokens == 2
    history: Any = [USER, message, USER, message.model_dump(), USER]
    assert client.chat.completions.create(model="cloud", messages=history).choices[0].finish_reason == "stop"
    sent = cloud.bodies[1]["messages"]
    assert sent[3] == message.model_dump()
    assert sent[1]["annotations"] == sent[3]["annotations"]


def test_tools_round_trip(connect: Connect, cloud: FullCloud) -> None:
    client = connect()
    called = client.chat.completions.create(model="cloud", messages=[USER], tools=TOOLS).choices[0]
    assert called.finish_reason == "tool_calls"
    result: Any = {"role": "tool", "tool_call_id": called.message.tool_calls[0].id, "content": "Rain."}
    for message in (called.message, called.message.model_dump()):
        answer = client.chat.completions.create(model="cloud", messages=[USER, message, result], tools=TOOLS)
        assert answer.choices[0].message.content == "Hi"
    assert cloud.bodies[2]["messages"][1] == called.message.model_dump()


def test_streams_and_accumulated_answers_round_trip(connect: Connect, cloud: FullCloud) -> None:
    client = connect()
    with client.chat.completions.stream(model="cloud", messages=[USER], tools=TOOLS) as stream:
        final = stream.get_final_completion()
    message = final.choices[0].message.model_dump()
    assert message["tool_calls"][0]["index"] == 0
    result: Any = {"role": "tool", "tool_call_id": "call_1", "content": "Rain."}
    chunks = list(client.chat.completions.create(model="cloud", messages=[USER, message, result], stream=True))
    assert cloud.bodies[1]["messages"][1] == message
    pieces = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(piece.delta.content or "" for piece in pieces) == "Hi"
    assert [bool(piece.delta.content) for piece in pieces if piece.finish_reason] == [False], "the finish comes apart"


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # openai's own, of its own helper's object
def test_parsed_answers_go_back(connect: Connect, cloud: FullCloud, local: ScriptedLocal) -> None:
    client = connect()
    parsed = client.chat.completions.parse(model="cloud", messages=[USER], response_format=City).choices[0].message
    assert parsed.parsed == City(city="Oslo")
    for history in ([USER, parsed, USER], [USER, parsed.model_dump(), USER]):
        client.chat.completions.create(model="cloud", messages=history)
        here = client.chat.completions.create(model="local", messages=history)
        assert here.choices[0].message.content == LOCAL_TEXT
        assert [message.text for message in local.calls[-1][0]] == ["hello", '{"city": "Oslo"}', "hello"]


def test_app_headers_reach_the_cloud_without_credentials(connect: Connect, cloud: FullCloud) -> None:
    client = connect(organization="org-1", project="proj-1", default_query={"api-version": "7"})
    extra = {"X-Title": "An app", "Cookie": "a=b", "X-Auth-Token": "hunter2"}
    client.chat.completions.create(model="cloud", messages=[USER], extra_headers=extra, extra_query={"trace": "on"})
    got = cloud.headers[0]
    assert (got["openai-organization"], got["openai-project"], got["x-title"]) == ("org-1", "proj-1", "An app")
    assert cloud.queries == ["api-version=7&trace=on"]
    assert got["authorization"] == "Bearer cloud-key"
    assert not {"cookie", "x-auth-token"} & got.keys() and not any(name.startswith("x-stainless") for name in got)


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"verbosity": "low"},
        {"modalities": ["text", "audio"], "audio": {"voice": "a", "format": "wav"}},
        {"web_search_options": {}},
        {"extra_body": {"top_k": -7}},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"extra_body": {"repetition_penalty": 3.0}},
        {"temperature": 5},
    ],
    ids=str,
)
def test_unsupported_fields_escalate_or_are_refused_by_name(
    connect: Connect, cloud: FullCloud, fields: dict[str, Any]
) -> None:
    client = connect()
    answer = client.chat.completions.create(model="auto", messages=[USER], **fields)
    assert answer.model_extra["updraft"]["reason"].startswith("beyond the device: ")
    wanted = {**fields, **fields.get("extra_body", {})}
    wanted.pop("extra_body", None)
    assert {name: cloud.bodies[0][name] for name in wanted} == wanted
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="local", messages=[USER], **fields)
    assert caught.value.param in wanted
    assert len(cloud.bodies) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_streaming_response_is_open(connect: Connect, stream: bool) -> None:
    client = connect()
    options: Any = {"model": "local", "messages": [USER], "stream": stream}
    with client.chat.completions.with_streaming_response.create(**options) as response:
        assert not response.is_closed
        text = "".join(response.iter_text())
    assert "one" in text


def test_values_that_change_nothing_stay_on_the_device(connect: Connect, local: ScriptedLocal) -> None:
    client = connect()
    nothing = {"audio": None, "functions": None, "top_k": -1, "stop": [], "tool_calls": None, "max_tokens": 8.0}
    hints = {"prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}, "safety_identifier": "me"}
    answer = client.chat.completions.create(
        model="auto",
        messages=[USER],
        service_tier="flex",
        verbosity="medium",
        store=False,
        metadata={"a": "b"},
        extra_body=nothing | hints,
    )
    assert answer.choices[0].message.content == LOCAL_TEXT
    assert local.calls[0][1].max_tokens == 8
