"""A model server as the local tier: our own daemon over a real model, servers with less, none, and public ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import updraft
from router_fakes import CLOUD_TEXT, FakeCloud, unused_url
from scripted_provider import ScriptedProvider, events, running_provider
from serving import serving
from updraft.cli.doctor.checks import check_local
from updraft.protocol.errors import ConfigurationError, ModelLoadError
from updraft.router.config import LocalModelOptions, RouterConfig
from updraft.router.factory import load_tiers, model_file
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from updraft.router.tiers.local_server.generation import ServerSignals
from updraft.router.tiers.local_server.tier import is_private, server_address

USER: list[Any] = [{"role": "user", "content": "hello"}]
PROBED = {"choices": [{"message": {"content": "a"}, "finish_reason": "length"}]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("llama_cpp")
    from tiny_gguf import tiny_model

    return tiny_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf").gguf


@pytest.fixture(scope="module")
def daemon(tiny: Path) -> Iterator[str]:
    """An OpenAI-compatible server with a real model and log-probabilities."""
    app = daemon_app(Router(RouterConfig(local=str(tiny))))
    with serving(app, lifespan=True) as url:
        yield url


@pytest.fixture
def bare() -> Iterator[ScriptedProvider]:
    """A server without log-probabilities, as LM Studio is."""
    with running_provider() as provider:
        provider.says({"data": [{"id": "small", "max_model_len": 512}]})
        provider.says(PROBED)
        yield provider


def test_the_same_answer_and_the_same_logprobs_as_in_process(tiny: Path, daemon: str) -> None:
    asked: dict[str, Any] = {"messages": USER, "max_tokens": 16, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    begun: dict[str, Any] = {
        "messages": [*USER, {"role": "assistant", "content": "The user"}],
        "max_tokens": 8,
        "temperature": 0,
        "extra_body": {"continue_final_message": True, "add_generation_prompt": False},
    }
    with updraft.OpenAI(config=RouterConfig(local=str(tiny))) as client:
        inside = client.chat.completions.create(model="local", **asked).choices[0]
        goes_on = client.chat.completions.create(model="local", **begun).choices[0].message.content
    with updraft.OpenAI(config=RouterConfig(local=daemon, local_model="tiny")) as client:
        reply = client.chat.completions.create(model="local", **asked)
        stream = client.chat.completions.create(model="local", messages=USER, max_tokens=16, temperature=0, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert client.chat.completions.create(model="local", **begun).choices[0].message.content == goes_on
    outside = reply.choices[0]
    assert reply.model == "tiny"
    assert outside.message.content == inside.message.content == streamed
    assert reply.usage is not None and reply.usage.prompt_tokens > 0
    assert outside.logprobs is not None and inside.logprobs is not None
    pairs = list(zip(outside.logprobs.content or [], inside.logprobs.content or [], strict=True))
    assert len(pairs) == 16
    assert all(ours.logprob == pytest.approx(theirs.logprob, abs=1e-4) for ours, theirs in pairs)
    assert all(ours.bytes == theirs.bytes and len(ours.top_logprobs) == 2 for ours, theirs in pairs)


def test_its_logprobs_decide_by_confidence(daemon: str, cloud: FakeCloud) -> None:
    config = RouterConfig(local=daemon, local_model="tiny", cloud_url=cloud.url, cloud_model="pocket-large")
    with updraft.OpenAI(config=config) as client:

        def text(confidence: float) -> str | None:
            extra = {"updraft": {"confidence": confidence}}
            asked = client.chat.completions.create(model="auto", messages=USER, max_tokens=16, extra_body=extra)
            return asked.choices[0].message.content

        assert text(0.9999) == CLOUD_TEXT, "a random model is never so sure"
        assert text(1e-6) != CLOUD_TEXT
        none = client.chat.completions.create(model="auto", messages=USER, max_tokens=16)
        assert none.choices[0].message.content == CLOUD_TEXT, "no policy, no local answer"


def test_server_of_several_models_needs_a_name(daemon: str) -> None:
    with pytest.raises(ModelLoadError, match=r"auto.*tiny.*local_model"):
        asyncio.run(load_tiers(RouterConfig(local=daemon)))


def test_without_logprobs_it_answers_where_it_is_asked_for(bare: ScriptedProvider, cloud: FakeCloud) -> None:
    config = RouterConfig(local=bare.url, cloud_url=cloud.url, cloud_model="pocket-large")
    chunk = {"choices": [{"index": 0, "delta": {"content": "Hi."}, "finish_reason": None}]}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}}
    with updraft.OpenAI(config=config) as client:
        auto = client.chat.completions.create(model="auto", messages=USER)
        assert auto.choices[0].message.content == CLOUD_TEXT
        bare.says(events(chunk, end))
        local = client.chat.completions.create(model="local", messages=USER)
        assert (local.choices[0].message.content, local.choices[0].finish_reason) == ("Hi.", "stop")
        assert "logprobs" not in bare.asked[-1].body
        with pytest.raises(openai.BadRequestError, match="does not report any"):
            client.chat.completions.create(model="local", messages=USER, logprobs=True)
        with pytest.raises(openai.BadRequestError, match="needs log-probabilities"):
            client.chat.completions.create(model="auto", messages=USER, extra_body={"updraft": {"confidence": 0.5}})


@pytest.mark.parametrize("content", ["Hi.", [{"type": "text", "text": "Hi."}], [{"text": "Hi"}, {"text": "."}]])
def test_parts_of_a_content_are_joined(bare: ScriptedProvider, content: Any) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": None}]}
    odd = {"choices": [{"index": 0, "delta": {"content": ["x"]}, "finish_reason": "stop"}]}
    with updraft.OpenAI(config=RouterConfig(local=bare.url)) as client:
        bare.says(events(chunk, odd))
        assert client.chat.completions.create(model="local", messages=USER).choices[0].message.content == "Hi."


def test_a_target_without_logprobs_is_an_error_at_once(bare: ScriptedProvider) -> None:
    with pytest.raises(ConfigurationError, match="no log-probabilities for small"):
        asyncio.run(load_tiers(RouterConfig(local=bare.url, confidence=0.5)))


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("data: {\n\n", 200),
        (events({"choices": [{"delta": {"content": "Hi"}}]}), 200),
        (events({"error": {"message": "out of memory"}}), 200),
        ({"error": {"message": "busy"}}, 503),
    ],
)
def test_a_broken_answer_goes_to_the_cloud(cloud: FakeCloud, answer: Any, status: int) -> None:
    sure = {"content": [{"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": []}]}
    with running_provider() as server:
        config = RouterConfig(local=server.url, cloud_url=cloud.url, cloud_model="pocket-large")
        server.says({"data": [{"id": "small"}]})
        server.says({"choices": [{"message": {"content": "a"}, "logprobs": sure}]})
        server.says(answer, status)
        server.says(answer, status)
        with updraft.OpenAI(config=config, max_retries=0) as client:
            extra = {"updraft": {"confidence": 0.5}}
            asked = client.chat.completions.create(model="auto", messages=USER, extra_body=extra)
            assert asked.choices[0].message.content == CLOUD_TEXT
            with pytest.raises(openai.APIStatusError, match=f"local server at {server.url}"):
                client.chat.completions.create(model="local", messages=USER)
        assert not server.answers, "it was asked both times"


def test_half_a_character_does_not_stop_an_escalation(cloud: FakeCloud) -> None:
    """The cloud is sent a draft that UTF-8 can hold."""
    unsure = {"content": [{"token": "a", "logprob": -5.0, "bytes": [97], "top_logprobs": []}]}
    said = {"choices": [{"delta": {"content": "Hm \ud83d"}, "logprobs": unsure, "finish_reason": "stop"}]}
    with running_provider() as server:
        config = RouterConfig(
            local=server.url, cloud_url=cloud.url, cloud_model="pocket-large", send_drafts=True, confidence=0.5
        )
        server.says({"data": [{"id": "small"}]})
        server.says({"choices": [{"message": {"content": "a"}, "logprobs": unsure}]})
        server.says(events(said))
        with updraft.OpenAI(config=config, max_retries=0) as client:
            reply = client.chat.completions.create(model="auto", messages=USER)
        assert reply.choices[0].message.content == CLOUD_TEXT
        assert cloud.requests[-1]["prediction"]["content"] == "Hm \ufffd"


def test_a_missing_server_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = unused_url()
    with pytest.raises(ModelLoadError, match=f"{url}/v1 does not answer"):
        asyncio.run(load_tiers(RouterConfig(local=url)))
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    monkeypatch.setenv("UPDRAFT_LOCAL", url)
    (check,) = check_local()
    assert (check.status, url in check.finding) == ("fail", True)


def test_the_doctor_tells_what_a_server_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bare: ScriptedProvider
) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    monkeypatch.setenv("UPDRAFT_LOCAL", bare.url)
    (check,) = check_local()
    assert (check.status, "small, 512 tokens" in check.finding) == ("warn", True)


@pytest.mark.parametrize(
    "host",
    [
        "8.8.8.8",
        "example.com",
        "localhost.example.com",
        "2130706433",
        "[2606:4700::1111]",
        "[::ffff:8.8.8.8]",
        "192.0.2.1",
        "172.32.0.1",
    ],
)
def test_a_public_server_is_no_device(host: str) -> None:
    with pytest.raises(ConfigurationError, match="local_public"):
        RouterConfig(local=f"http://{host}:8080")
    assert RouterConfig(local=f"http://{host}:8080", local_public=True).local


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.1.2.3", "192.168.0.9", "::1", "fd00::1", "172.16.5.5"])
def test_loopback_and_private_addresses_are(host: str) -> None:
    assert is_private(host)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("", "http://127.0.0.1:11434/v1"),
        ("127.0.0.1", "http://127.0.0.1:11434/v1"),
        ("127.0.0.1:1234", "http://127.0.0.1:1234/v1"),
        ("127.0.0.1:", "http://127.0.0.1:11434/v1"),
        ("localhost:99", "http://localhost:99/v1"),
        (":1234", "http://127.0.0.1:1234/v1"),
        ("0.0.0.0", "http://127.0.0.1:11434/v1"),
        ("0.0.0.0:1234", "http://127.0.0.1:1234/v1"),
        ("http://127.0.0.1", "http://127.0.0.1/v1"),
        ("http://127.0.0.1:8080/ollama/", "http://127.0.0.1:8080/ollama/v1"),
        ("https://10.0.0.7", "https://10.0.0.7/v1"),
        ("::1", "http://[::1]:11434/v1"),
        ("[::1]", "http://[::1]:11434/v1"),
        ("[::1]:12", "http://[::1]:12/v1"),
        ("[::]:12", "http://[::1]:12/v1"),
        (" '127.0.0.1:7' ", "http://127.0.0.1:7/v1"),
    ],
)
def test_ollama_listens_where_its_variable_says(monkeypatch, host: str, url: str) -> None:
    monkeypatch.setenv("OLLAMA_HOST", host)
    assert RouterConfig(local="ollama:qwen3").local == "ollama:qwen3"
    address = server_address("ollama:qwen3")
    assert address is not None and (address.url, address.model) == (url, "qwen3")


@pytest.mark.parametrize(
    ("host", "fault"),
    [
        ("ollama.com", "OLLAMA_HOST names .* privacy rules .* local_public"),
        ("8.8.8.8:11434", "OLLAMA_HOST names .* not a private address"),
        ("127.0.0.1:port", "OLLAMA_HOST .* is not a URL"),
        ("127.0.0.1:99999", "OLLAMA_HOST .* is not a URL"),
        ("http://user:pw@h:1", "^OLLAMA_HOST 'http://h:1' must be .* omit credentials"),
        ("user:pw@h", "^OLLAMA_HOST 'h' must be .* omit credentials"),
        ("http://user:p/w@h:1", "^OLLAMA_HOST 'http://h:1' is not a URL"),
        ("h:1:2", "^OLLAMA_HOST 'h:1:2' is not a URL"),
        ("ftp://127.0.0.1", "OLLAMA_HOST .* must be a URL"),
        ("http://user:word@127.0.0.1", "omit credentials"),
    ],
)
def test_an_ollama_that_is_not_on_the_device(monkeypatch, host: str, fault: str) -> None:
    monkeypatch.setenv("OLLAMA_HOST", host)
    with pytest.raises(ConfigurationError, match=fault) as raised:
        RouterConfig(local="ollama:qwen3")
    assert "word" not in raised.value.message


def test_values_of_local(monkeypatch) -> None:
    monkeypatch.delenv("OLLAMA_HOST", raising=False)
    ollama = server_address("ollama:qwen3:4b")
    assert ollama is not None and (ollama.url, ollama.model) == ("http://127.0.0.1:11434/v1", "qwen3:4b")
    assert server_address("model.gguf") is None
    for wrong in (
        {"local": "ollama:"},
        {"local": "http://user:word@127.0.0.1"},
        {"local": "model.gguf", "local_model": "x"},
        {"local": "http://127.0.0.1", "local_idle_s": 5.0},
        {"local": "http://127.0.0.1", "local_options": LocalModelOptions(threads=2)},
    ):
        with pytest.raises(ConfigurationError) as raised:
            RouterConfig(**wrong)
        assert "word" not in raised.value.message
    with pytest.raises(ConfigurationError, match="a model file is needed"):
        model_file(RouterConfig(local="ollama:qwen3"))


def test_signals_from_the_alternatives() -> None:
    from math import log

    even = ServerSignals.of(log(0.5), [log(0.5), log(0.5)])
    assert (even.entropy, even.margin) == (pytest.approx(log(2)), pytest.approx(0))
    rest = ServerSignals.of(log(0.5), [log(0.5), log(0.25)])
    assert rest.entropy == pytest.approx(1.5 * log(2)), "what is left counts as one token"
    assert rest.margin == pytest.approx(log(2))
