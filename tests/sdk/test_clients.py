"""The genuine openai clients over our transport: everything an app does with them, against the fakes."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import updraft
from openai_versions import passes_errors_on
from router_fakes import CLOUD_TEXT, LOCAL_TEXT, FakeCloud, ScriptedGates, ScriptedLocal, tiers
from updraft.accounting.prices import Price
from updraft.protocol.errors import ConfigurationError, EngineError
from updraft.router.accounting.budget import BudgetLimits
from updraft.router.accounting.prices import Prices
from updraft.router.config import RouterConfig
from updraft.router.privacy.rules import Privacy
from waiting import ledger_rows, wait_for

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
def local() -> ScriptedLocal:
    return ScriptedLocal()


@pytest.fixture
def config(cloud: FakeCloud, tmp_path: Path) -> RouterConfig:
    return RouterConfig(
        local="pocket",
        cloud_url=cloud.url,
        cloud_model="pocket-large",
        ledger=tmp_path / "ledger.sqlite3",
        cloud_timeout_s=60.0,
        prices=Prices(cloud_input=0.5, cloud_output=1.5),
    )


@pytest.fixture
def gates() -> ScriptedGates:
    return ScriptedGates()


@pytest.fixture(autouse=True)
def scripted(local: ScriptedLocal, gates: ScriptedGates, monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(config: RouterConfig) -> Any:
        return tiers(local, config, gates)

    monkeypatch.setattr("updraft.router.router.load_tiers", load)


@pytest.fixture
def client(config: RouterConfig) -> Iterator[updraft.OpenAI]:
    with updraft.OpenAI(config=config) as client:
        yield client


def router_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "updraft-router"]


def test_clients_are_openai_classes(client: updraft.OpenAI) -> None:
    assert isinstance(client, openai.OpenAI)
    assert issubclass(updraft.AsyncOpenAI, openai.AsyncOpenAI)


def test_a_completion_with_its_reason(client: updraft.OpenAI) -> None:
    completion = client.chat.completions.create(model="auto", messages=USER)
    assert completion.choices[0].message.content == LOCAL_TEXT
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 6
    assert completion.model_extra is not None
    assert completion.model_extra["updraft"]["route"] == "local"
    assert completion._request_id == completion.id


def test_embeddings_are_the_clouds(client: updraft.OpenAI, config: RouterConfig, cloud: FakeCloud) -> None:
    for model, why in (("auto", "embeddings come from the cloud"), ("cloud", "the request asked for the cloud")):
        reply = client.embeddings.create(model=model, input=["a", "four"])
        assert [item.embedding for item in reply.data] == [[1.0], [4.0]]
        assert reply.usage.prompt_tokens == 11
        assert reply.model_extra and reply.model_extra["updraft"]["reason"] == why
    assert [request["model"] for request in cloud.requests] == ["pocket-large"] * 2
    assert config.ledger is not None
    rows = ledger_rows(config.ledger, 2)
    assert [(row.route, row.status, row.local_tokens, bool(row.cost_usd)) for row in rows] == [
        ("cloud", 200, 0, True)
    ] * 2


@pytest.mark.parametrize(
    ("model", "extra", "mode", "status", "message"),
    [
        ("auto", {"updraft": {"private": True}}, "healthy", 400, "vectors of two models are not comparable"),
        ("auto", {"updraft": {"quality": 0.9}}, "healthy", 400, "no gate judges"),
        ("auto", {"updraft": {"odd": 1}}, "healthy", 400, "known: quality"),
        ("auto", {}, "400", 400, "cloud error 400"),
        ("auto", {}, "garbage", 502, "has no embeddings"),
    ],
)
def test_embeddings_that_cannot_be(
    client: updraft.OpenAI,
    config: RouterConfig,
    cloud: FakeCloud,
    model: str,
    extra: dict[str, Any],
    mode: str,
    status: int,
    message: str,
) -> None:
    cloud.mode = mode
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        client.with_options(max_retries=0).embeddings.create(model=model, input=["a"], extra_body=extra)
    assert caught.value.status_code == status
    assert config.ledger is not None
    assert [row.status for row in ledger_rows(config.ledger)] == [status]


@pytest.mark.parametrize("change", [{"offline": True}, {"cloud_url": None}])
def test_embeddings_without_a_cloud_are_the_devices(config: RouterConfig, change: dict[str, Any]) -> None:
    with updraft.OpenAI(config=replace(config, **change)) as client:
        reply = client.embeddings.create(model="auto", input=["four", [1, 2, 3, 4]])
        assert [item.embedding for item in reply.data] == [pytest.approx([0.6, 0.8])] * 2
        assert (reply.model, reply.usage.prompt_tokens) == ("fake-small", 14)
        with pytest.raises(openai.NotFoundError if "cloud_url" in change else openai.BadRequestError):
            client.embeddings.create(model="text-embedding-9", input=["a"])


def test_text_completions(client: updraft.OpenAI, cloud: FakeCloud) -> None:
    """As they are: from the cloud, under the name of a model of its own too, or from the device."""
    for model, asked in (("auto", "pocket-large"), ("gpt-instruct", "gpt-instruct")):
        completion = client.completions.create(model=model, prompt="Once", suffix="end.", best_of=2)
        assert (completion.choices[0].text, cloud.requests[-1]["model"]) == (CLOUD_TEXT, asked)
        assert (cloud.requests[-1]["suffix"], cloud.requests[-1]["best_of"]) == ("end.", 2)
        stream = client.completions.create(model=model, prompt="Once", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == CLOUD_TEXT
    asked_cloud = len(cloud.requests)
    completion = client.completions.create(model="local", prompt=["a", "b"], n=2, echo=True, max_tokens=2)
    assert [choice.text for choice in completion.choices] == ["aone two", "aone two", "bone two", "bone two"]
    assert [choice.finish_reason for choice in completion.choices] == ["length"] * 4
    assert completion.usage is not None and completion.usage.completion_tokens == 8
    scored = client.completions.create(model="local", prompt=[65, 66], logprobs=1).choices[0].logprobs
    assert scored is not None and scored.tokens == [f"<{index}>" for index in range(6)]
    assert scored.text_offset is not None and len(scored.text_offset) == 6
    chunks = list(
        client.completions.create(
            model="local", prompt="a", n=2, stream=True, stream_options={"include_usage": True}, logprobs=0
        )
    )
    for index in (0, 1):
        assert "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index) == LOCAL_TEXT
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
    assert chunks[-2].model_extra and chunks[-2].model_extra["updraft"]["route"] == "local"
    for refused in ({"suffix": "x"}, {"best_of": 3}, {"echo": True, "logprobs": 1}, {"n": 129}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="local", prompt="a", **refused)  # type: ignore[arg-type]
        assert caught.value.param in refused
    assert len(cloud.requests) == asked_cloud


def test_text_completions_fall_back_as_chats_do(client: updraft.OpenAI, cloud: FakeCloud, local: ScriptedLocal) -> None:
    cloud.mode = "500"
    completion = client.completions.create(model="auto", prompt="Once")
    assert completion.choices[0].text == LOCAL_TEXT
    assert completion.model_extra and completion.model_extra["updraft"]["route"] == "fallback"
    local.fails_at, local.error = 1, EngineError("the device failed")
    with pytest.raises(openai.APIError, match="the device failed"):
        list(client.completions.create(model="local", prompt="Once", stream=True))
    assert local.running == 0


def test_cloud_only_endpoints_are_passed_on(client: updraft.OpenAI, config: RouterConfig, cloud: FakeCloud) -> None:
    assert client.moderations.create(input="hi").model_extra == {"told": {"input": "hi"}, "usage": {"prompt_tokens": 3}}
    speech = client.audio.speech.create(model="tts-1", voice="alloy", input="hi")
    assert (speech.content, speech.response.headers["content-type"]) == (b"RIFF\x00\xff", "audio/wav")
    with client.audio.speech.with_streaming_response.create(
        model="tts-1", voice="alloy", input="hi", stream_format="sse"
    ) as events:
        assert b"".join(events.iter_bytes()) == b"data: {}\n\ndata: [DONE]\n\n"
    heard = client.audio.transcriptions.create(model="cloud", file=("a.wav", b"RIFF\x00"))
    told = heard.model_extra["told"]  # type: ignore[index]
    assert "pocket-large" in told["raw"] and "a.wav" in told["raw"] and told["type"].startswith("multipart/form-data")
    with pytest.raises(openai.NotFoundError, match="no rankings here"):
        client.post("/rerank", body={"model": "r", "query": "q", "documents": ["a"]}, cast_to=object)
    sent = len(cloud.requests)
    for model in ("local", "fake-small"):
        with pytest.raises(openai.BadRequestError, match="cannot create transcriptions"):
            client.audio.transcriptions.create(model=model, file=("a.wav", b"RIFF"))
    with pytest.raises(openai.BadRequestError, match="cannot create moderations"):
        client.moderations.create(input="hi", extra_body={"updraft": {"private": True}})
    assert len(cloud.requests) == sent
    private = replace(config, privacy=Privacy(builtin=("email",)))
    with updraft.OpenAI(config=private) as guarded:
        for ask in (
            lambda: guarded.moderations.create(input="write to a@example.org"),
            lambda: guarded.audio.transcriptions.create(model="whisper-1", file=("a.wav", b"RIFF")),
            lambda: guarded.completions.create(model="cloud", prompt="write to a@example.org"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                ask()
            assert caught.value.code == "private"
        assert guarded.completions.create(model="auto", prompt="write to a@example.org").choices[0].text == LOCAL_TEXT
    assert len(cloud.requests) == sent
    prices = Prices(models={"pocket-large": Price(input=0.5, output=1.5)})
    priced = replace(config, budget=BudgetLimits(usd=1.0), prices=prices)
    with updraft.OpenAI(config=priced) as limited, pytest.raises(openai.BadRequestError, match="has no price"):
        limited.audio.speech.create(model="tts-1", voice="alloy", input="hi")


def test_tokens_of_the_device(client: updraft.OpenAI) -> None:
    def ask(path: str, **body: Any) -> Any:
        return client.post(f"http://updraft.invalid{path}", body=body, cast_to=object)

    assert ask("/tokenize", prompt="ab") == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [0, 97, 98],
        "token_strs": None,
    }
    assert ask("/detokenize", tokens=[97, 98]) == {"prompt": "ab"}
    counted = ask("/v1/chat/completions/input_tokens", model="auto", messages=USER)
    assert counted == {"object": "response.input_tokens", "input_tokens": 6}
    for path, body in (
        ("/tokenize", {"prompt": "a", "model": "cloud"}),
        ("/detokenize", {"tokens": [256]}),
        ("/detokenize", {"tokens": [0] * 513}),
        ("/tokenize", {}),
    ):
        with pytest.raises(openai.BadRequestError):
            ask(path, **body)


def test_aliases_are_models_too(config: RouterConfig, cloud: FakeCloud) -> None:
    named = replace(config, aliases={"gpt-4o": "mini", "mini": "local", "big": "cloud"})
    with updraft.OpenAI(config=named) as client:
        cards = {card.id: card.model_dump() for card in client.models.list()}
        assert (cards["gpt-4o"]["root"], cards["gpt-4o"]["max_model_len"]) == ("local", 512)
        assert "embeddings" in cards["local"]["capabilities"] and "tools" not in cards["local"]["capabilities"]
        assert client.models.retrieve("big").model_dump()["root"] == "cloud"
        assert client.chat.completions.create(model="gpt-4o", messages=USER).model == "fake-small"
        assert client.chat.completions.create(model="big", messages=USER).choices[0].message.content == CLOUD_TEXT
        assert client.embeddings.create(model="big", input=["a"]).data[0].embedding == [1.0]
        assert [request["model"] for request in cloud.requests] == ["pocket-large"] * 2
    clashing = replace(config, aliases={"fake-small": "cloud"})
    with (
        updraft.OpenAI(config=clashing, max_retries=0) as client,
        pytest.raises(openai.APIStatusError, match="Rename the alias"),
    ):
        client.models.list()


@pytest.mark.parametrize(
    "aliases",
    [{"a": "b", "b": "a"}, {"a": "a"}, {"auto": "cloud"}, {"pocket-large": "local"}, {"a": "gpt-9"}, {"": "auto"}],
)
def test_aliases_that_cannot_be(config: RouterConfig, aliases: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="aliases"):
        replace(config, aliases=aliases)


def test_usage_that_was_asked_for_is_null_until_the_end(client: updraft.OpenAI) -> None:
    for model in ("local", "auto"):
        raw = client.chat.completions.with_raw_response.create(
            model=model, messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk.to_dict() for chunk in raw.parse()]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["usage"]["completion_tokens"] == 6
    plain = client.chat.completions.create(model="local", messages=USER, stream=True)
    assert all("usage" not in chunk.to_dict() for chunk in plain)


def test_own_options_travel_as_extra_body(client: updraft.OpenAI, cloud: FakeCloud, gates: ScriptedGates) -> None:
    gates._after = True
    kept = client.chat.completions.create(model="auto", messages=USER, extra_body={"updraft": {"private": True}})
    assert kept.choices[0].message.content == LOCAL_TEXT
    assert not cloud.requests
    sent = client.chat.completions.create(model="auto", messages=USER)
    assert sent.choices[0].message.content == CLOUD_TEXT


def test_streaming(client: updraft.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="auto", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == LOCAL_TEXT
    assert chunks[-1].usage is not None
    assert chunks[-2].model_extra is not None
    assert chunks[-2].model_extra["updraft"]["tier"] == "local"


def test_the_streaming_helper(client: updraft.OpenAI) -> None:
    with client.chat.completions.stream(model="cloud", messages=USER) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == CLOUD_TEXT


def test_raw_and_streaming_responses_show_headers(client: updraft.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="auto", messages=USER)
    assert raw.headers["x-updraft-tier"] == "local"
    assert raw.parse().choices[0].message.content == LOCAL_TEXT
    with client.chat.completions.with_streaming_response.create(model="auto", messages=USER, stream=True) as response:
        assert response.headers["x-updraft-route"] == "local"
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_models(client: updraft.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["auto", "local", "cloud", "pocket-large", "fake-small"]
    assert client.models.retrieve("auto").id == "auto"
    card = client.models.retrieve("fake-small")
    assert card.created > 10**9
    assert card.model_extra and card.model_extra["max_model_len"] == 512


def test_errors_are_the_genuine_ones(client: updraft.OpenAI, cloud: FakeCloud) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=USER)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="auto", messages=USER, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="at least one message"):
        client.chat.completions.create(model="auto", messages=[])
    cloud.mode = "401"
    with pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model="cloud", messages=USER)
    cloud.mode = "garbage"
    with pytest.raises(openai.InternalServerError) as broken:
        client.with_options(max_retries=0).chat.completions.create(model="cloud", messages=USER)
    assert broken.value.status_code == 502


@pytest.mark.parametrize(
    ("answer", "headers", "raised", "message"),
    [
        ((404, b'{"object": "error", "message": "No m."}'), {}, openai.NotFoundError, "No m."),
        (
            (422, b'{"detail": [{"loc": ["body", "n"], "msg": "odd"}]}'),
            {},
            openai.UnprocessableEntityError,
            "body.n: odd",
        ),
        ((429, b"slow down"), {"retry-after": "7200"}, openai.RateLimitError, "slow down"),
        ((308, b""), {"location": "https://new.example/v1/chat/completions"}, openai.APIStatusError, "new.example"),
    ],
)
@pytest.mark.parametrize("model", ["cloud", "auto"])
def test_a_clouds_errors_keep_their_meaning(
    config: RouterConfig,
    cloud: FakeCloud,
    gates: ScriptedGates,
    model: str,
    answer: Any,
    headers: dict[str, str],
    raised: type[openai.APIStatusError],
    message: str,
) -> None:
    gates._after = True
    cloud.says, cloud.headers = answer, headers
    with updraft.OpenAI(config=replace(config, fallback="never")) as client, pytest.raises(raised) as caught:
        client.chat.completions.create(model=model, messages=USER)
    assert message in caught.value.message
    assert caught.value.response.headers.get("retry-after") == headers.get("retry-after")
    assert len(cloud.requests) == 1, "neither the router nor openai's client asks again"


def test_retries_are_openais_own(client: updraft.OpenAI, cloud: FakeCloud) -> None:
    cloud.mode = "garbage"
    with pytest.raises(openai.InternalServerError):
        client.with_options(max_retries=1).chat.completions.create(model="cloud", messages=USER)
    assert len(cloud.requests) == 2


def test_an_error_in_the_middle_of_a_stream(client: updraft.OpenAI, cloud: FakeCloud) -> None:
    cloud.mode = "cut"
    with pytest.raises(openai.APIError, match="cut"):
        list(client.chat.completions.create(model="cloud", messages=USER, stream=True))


@pytest.mark.parametrize("error", [b'{"error": {"message": "no more", "type": "server_error"}}', b"no JSON"])
def test_text_before_an_error_is_delivered(client: updraft.OpenAI, cloud: FakeCloud, error: bytes) -> None:
    """In one piece: the text is read first, and the request is not made anew."""
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    texts = [{**head, "choices": [{"index": 0, "delta": {"content": word}}]} for word in ("one ", "two ")]
    cloud.says = (
        200,
        b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in texts) + b"data: %b\n\n" % error,
    )
    said: list[str] = []
    with pytest.raises(openai.APIError):
        for chunk in client.chat.completions.create(model="cloud", messages=USER, stream=True):
            said += [choice.delta.content or "" for choice in chunk.choices]
    assert ("".join(said), len(cloud.requests)) == ("one two ", 1)


@passes_errors_on
def test_a_timeout_is_openais_and_is_not_repeated(client: updraft.OpenAI, local: ScriptedLocal) -> None:
    client.chat.completions.create(model="local", messages=USER)  # the router has started
    local.delay_s = 100.0
    begun = time.monotonic()
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="local", messages=USER, timeout=1.0)
    assert time.monotonic() - begun < 100
    assert local.started == 2
    assert local.running == 0


@passes_errors_on
def test_a_stream_that_stalls_times_out(client: updraft.OpenAI, local: ScriptedLocal) -> None:
    client.chat.completions.create(model="local", messages=USER)  # the router has started
    stream = client.chat.completions.create(model="local", messages=USER, stream=True, timeout=1.0)
    local.delay_s = 100.0
    with pytest.raises(openai.APITimeoutError):
        list(stream)
    assert local.running == 0


def test_closing_a_stream_early_stops_the_work(client: updraft.OpenAI, cloud: FakeCloud) -> None:
    cloud.mode = "hang"
    with client.chat.completions.create(model="cloud", messages=USER, stream=True) as stream:
        next(stream)
    wait_for(lambda: cloud.disconnects)
    assert cloud.disconnects == 1


def test_a_dropped_stream_stops_too(client: updraft.OpenAI, local: ScriptedLocal) -> None:
    stream = client.chat.completions.create(model="local", messages=USER, stream=True)
    next(stream)
    assert local.running == 1
    del stream
    gc.collect()
    wait_for(lambda: not local.running)


def test_copies_share_one_router(client: updraft.OpenAI, local: ScriptedLocal) -> None:
    other = client.with_options(max_retries=0, timeout=60).copy(default_headers={"x-app": "test"})
    assert isinstance(other, updraft.OpenAI)
    other.chat.completions.create(model="auto", messages=USER)
    client.chat.completions.create(model="auto", messages=USER)
    assert local.started == 2
    assert len(router_threads()) == 1
    with pytest.raises(ConfigurationError, match="base_url"):
        client.copy(base_url="http://elsewhere/v1")


@passes_errors_on
def test_close_ends_everything_and_is_final(config: RouterConfig, local: ScriptedLocal) -> None:
    client = updraft.OpenAI(config=config)
    client.chat.completions.create(model="auto", messages=USER)
    stream = client.chat.completions.create(model="local", messages=USER, stream=True)
    client.close()
    client.close()
    assert local.closed
    assert local.running == 0
    assert not router_threads()
    with pytest.raises(openai.APIConnectionError):
        list(stream)
    with pytest.raises((openai.APIConnectionError, RuntimeError)):
        client.chat.completions.create(model="auto", messages=USER)


def test_close_cancels_a_request_of_another_thread(config: RouterConfig, local: ScriptedLocal) -> None:
    local.delay_s = 30
    client = updraft.OpenAI(config=config)
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            client.chat.completions.create(model="local", messages=USER)
        except openai.APIConnectionError as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not local.running:
        time.sleep(0.01)
    client.close()
    thread.join(60)
    assert len(caught) == 1


def test_a_lost_client_takes_its_router_with_it(config: RouterConfig, local: ScriptedLocal) -> None:
    client = updraft.OpenAI(config=config)
    client.chat.completions.create(model="auto", messages=USER)
    del client
    gc.collect()
    assert local.closed
    assert not router_threads()


def test_one_client_from_many_threads(client: updraft.OpenAI, config: RouterConfig) -> None:
    answers: list[str | None] = []

    def ask() -> None:
        answers.append(client.chat.completions.create(model="auto", messages=USER).choices[0].message.content)

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == [LOCAL_TEXT] * 16
    assert config.ledger is not None
    assert len(ledger_rows(config.ledger, 16)) == 16


# Settings


def test_settings_of_the_constructor(config: RouterConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-somebody-elses")

    def settings(**options: Any) -> RouterConfig:
        with updraft.OpenAI(**options) as client:
            return client._client.updraft_lease.config  # type: ignore[attr-defined]

    assert settings(local="pocket").cloud_api_key is None, "OPENAI_API_KEY is for OpenAI, not for any cloud_url"
    assert settings(local="pocket", api_key="sk-1").cloud_api_key == "sk-1"
    assert settings(config=config, quality=0.9).quality == 0.9
    assert str(settings(config=config, cloud_share=0.3).target) == "cloud_share 0.3"
    assert str(settings(config=replace(config, quality=0.9), cost=2.0).target) == "cost 2 US dollars per 1,000 requests"
    pair = {"local": "pocket", "cloud_model": "pocket-large"}
    assert str(settings(**pair, quality=0.9, promise="mean").target) == "quality 0.9 on average"
    assert str(settings(config=config, cost=0.5).target) == "cost 0.5 US dollars per 1,000 requests"
    with pytest.raises(ConfigurationError, match="'pocket-large' has no price"):
        settings(**pair, cost=0.5)
    assert settings(local=Path("m.gguf"), cloud_url="http://h:1", cloud_model="big").local == "m.gguf"
    assert settings(cloud_url="http://h:1", cloud_model="big").cloud_url == "http://h:1/v1"
    keyed = replace(config, cloud_api_key="sk-mine")
    assert settings(config=keyed, quality=0.9).cloud_api_key == "sk-mine"
    assert settings(config=keyed, cloud_url="http://other:1").cloud_api_key is None, "the key is for its own URL"
    assert settings(config=keyed, cloud_url="http://other:1", api_key="sk-2").cloud_api_key == "sk-2"
    with pytest.raises(ConfigurationError, match="exclude each other"):
        settings(quality=0.9, cloud_share=0.3)
    with pytest.raises(ConfigurationError, match="quality must be a number"):
        settings(config=config, quality="0.9")
    for wrong in (
        {"quality": 2},
        {"cloud_share": 1.5},
        {"cost": -1},
        {"promise": "surely"},
        {"base_url": "http://x/v1"},
        {"cloud_url": "ftp://x"},
        {"http_client": object()},
    ):
        with pytest.raises(ConfigurationError):
            settings(**wrong)


def test_a_router_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, config: RouterConfig) -> None:
    async def load(config: RouterConfig) -> Any:
        raise ConfigurationError("The policy does not fit.")

    monkeypatch.setattr("updraft.router.router.load_tiers", load)
    with (
        updraft.OpenAI(config=config) as client,
        pytest.raises(openai.InternalServerError, match="The policy does not fit"),
    ):
        client.chat.completions.create(model="auto", messages=USER)


# Privacy


def test_private_requests_open_no_socket(client: updraft.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    client.chat.completions.create(model="auto", messages=USER)  # the loop's own socket pair exists from here on

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a private request opened a socket")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    private = {"updraft": {"private": True}}
    assert client.chat.completions.create(model="auto", messages=USER, extra_body=private)
    assert list(client.chat.completions.create(model="auto", messages=USER, extra_body=private, stream=True))
    assert client.chat.completions.create(model="local", messages=USER)


# Async


@asynccontextmanager
async def async_client(config: RouterConfig) -> AsyncIterator[updraft.AsyncOpenAI]:
    async with updraft.AsyncOpenAI(config=config) as client:
        yield client


def test_async_completion_stream_and_errors(config: RouterConfig, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with async_client(config) as client:
            completion = await client.chat.completions.create(model="auto", messages=USER)
            assert completion.choices[0].message.content == LOCAL_TEXT
            stream = await client.chat.completions.create(model="cloud", messages=USER, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            assert text == CLOUD_TEXT
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="gpt-9", messages=USER)
            raw = await client.with_options(max_retries=0).chat.completions.with_raw_response.create(
                model="auto", messages=USER
            )
            assert raw.headers["x-updraft-tier"] == "local"
        assert not router_threads()

    asyncio.run(test())


def test_async_timeout_cancel_and_early_close(config: RouterConfig, local: ScriptedLocal, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with async_client(config) as client:
            local.delay_s = 100.0
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model="local", messages=USER, timeout=0.5)
            task = asyncio.create_task(client.chat.completions.create(model="local", messages=USER))
            while not local.running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            cloud.mode = "hang"
            stream = await client.chat.completions.create(model="cloud", messages=USER, stream=True)
            await anext(aiter(stream))
            await stream.close()
            await asyncio.to_thread(wait_for, lambda: cloud.disconnects and not local.running)
            assert cloud.disconnects == 1

    asyncio.run(test())


def test_sixty_four_async_requests_while_the_cloud_dies(
    config: RouterConfig, cloud: FakeCloud, gates: ScriptedGates
) -> None:
    gates._after = True
    cloud.fail_after = 20

    async def test() -> None:
        async with async_client(config) as client:

            async def ask(index: int) -> None:
                if index % 2:
                    completion = await client.chat.completions.create(model="auto", messages=USER)
                    assert completion.choices[0].message.content in (CLOUD_TEXT, LOCAL_TEXT)
                    return
                try:
                    stream = await client.chat.completions.create(model="auto", messages=USER, stream=True)
                    assert [chunk async for chunk in stream]
                except openai.APIError as error:
                    assert "cut" in str(error) or "failed" in str(error)

            await asyncio.gather(*[ask(index) for index in range(64)])

    asyncio.run(test())
    assert config.ledger is not None
    rows = ledger_rows(config.ledger, 64)
    assert len(rows) == 64
    assert {row.route for row in rows} <= {"escalated", "fallback"}


# The other httpx


def test_the_adapter_of_older_openai_releases(config: RouterConfig, local: ScriptedLocal) -> None:
    body = {"model": "local", "messages": USER}
    url = "http://updraft.invalid/v1"
    with httpx.Client(transport=updraft.transport(config, httpx=httpx), base_url=url) as client:
        assert client.post("/chat/completions", json=body).json()["model"] == "fake-small"
        with client.stream("POST", "/chat/completions", json=body | {"stream": True}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert list(response.iter_lines())[-2] == "data: [DONE]"
        assert client.get("/nowhere").status_code == 404
        local.delay_s = 100.0
        with pytest.raises(httpx.ReadTimeout):
            client.post("/chat/completions", json=body, timeout=0.5)

    async def test() -> None:
        async with httpx.AsyncClient(transport=updraft.async_transport(config, httpx=httpx), base_url=url) as client:
            assert (await client.post("/chat/completions", json=body)).json()["model"] == "fake-small"
            async with client.stream("POST", "/chat/completions", json=body | {"stream": True}) as response:
                events = [line async for line in response.aiter_lines() if line]
            assert json.loads(events[-2].removeprefix("data: "))["updraft"]["tier"] == "local"

    local.delay_s = 0
    asyncio.run(test())
