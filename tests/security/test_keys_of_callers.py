"""The key that a caller names for a client or a request pays for it: no other key does, and nobody else sees it."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import updraft
from serving import serving
from updraft.protocol.errors import ConfigurationError, UnsupportedFeatureError
from updraft.router.config import CacheSettings, CloudTierConfig, RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from updraft.sdk.transport import httpx_of_openai

A, B, C = "sk-key-of-the-client-aaaa", "sk-key-of-the-tenant-bbbb", "sk-key-of-another-cccc"
USER: Any = [{"role": "user", "content": "hi"}]


@dataclass
class Cloud:
    """Answers with the number of the request, and keeps the headers and target of each."""

    url: str = ""
    seen: list[dict[str, str]] = field(default_factory=list)
    status: int = 200

    @property
    def keys(self) -> list[str | None]:
        seen, self.seen = [each.get("authorization") for each in self.seen], []
        return seen


@contextmanager
def running_cloud() -> Iterator[Cloud]:
    cloud = Cloud()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            cloud.seen.append({name.lower(): value for name, value in self.headers.items()} | {":path": self.path})
            number = str(len(cloud.seen))
            choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
            if cloud.status != 200:
                answer: Any = {"error": {"message": f"Wrong key: {self.headers.get('authorization')}"}}
            elif "/embeddings" in self.path:
                answer = {"object": "list", "model": "m", "data": [{"index": 0, "embedding": [1.0]}]}
            elif "/chat/completions" in self.path:
                said = "delta" if b'"stream":true' in body else "message"
                answer = {"id": number, "created": 1, "model": "m"}
                answer["choices"] = [{**choice, said: {"role": "assistant", "content": number}}]
            else:
                answer = {"id": number, "created": 1, "model": "m", "choices": [{**choice, "text": number}]}
            data, kind = json.dumps(answer).encode(), "application/json"
            if b'"stream":true' in body and cloud.status == 200:
                data, kind = b"data: " + data + b"\n\ndata: [DONE]\n\n", "text/event-stream"
            self.send_response(cloud.status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.send_header("set-cookie", f"session={number}; Path=/")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_arguments: object) -> None:
            """Keep the test's output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        cloud.url = f"http://127.0.0.1:{server.server_port}"
        yield cloud
        server.shutdown()


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with running_cloud() as cloud:
        yield cloud


@pytest.fixture
def config(cloud: Cloud, tmp_path: Path) -> RouterConfig:
    return RouterConfig(
        cloud_url=f"{cloud.url}/v1",
        cloud_model="m",
        cloud_api_key=A,
        ledger=tmp_path / "ledger.sqlite3",
        files=tmp_path / "files",
    )


@pytest.fixture
def client(config: RouterConfig) -> Iterator[updraft.OpenAI]:
    with updraft.OpenAI(config=config, max_retries=0) as client:
        yield client


def ask(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="cloud", messages=USER, **options)


def assign(client: Any, key: str) -> Any:
    other = client.copy()
    other.api_key = key
    return other


NAMED: dict[str, Callable[[Any, str], Any]] = {
    "with_options": lambda client, key: client.with_options(api_key=key),
    "copy": lambda client, key: client.copy(api_key=key),
    "attribute": assign,
    "callable": lambda client, key: client.with_options(api_key=lambda: key),
    "default header": lambda client, key: client.with_options(default_headers={"Authorization": f"Bearer {key}"}),
    "x-api-key": lambda client, key: client.with_options(default_headers={"x-api-key": key}),
    "api-key": lambda client, key: client.with_options(default_headers={"api-key": key}),
}
RESOURCES: dict[str, Callable[[Any], Any]] = {
    "chat": ask,
    "stream": lambda client: list(ask(client, stream=True)),
    "raw": lambda client: client.chat.completions.with_raw_response.create(model="cloud", messages=USER),
    "completions": lambda client: client.completions.create(model="cloud", prompt="hi"),
    "completion stream": lambda client: list(client.completions.create(model="cloud", prompt="hi", stream=True)),
    "responses": lambda client: client.responses.create(model="cloud", input="hi"),
    "embeddings": lambda client: client.embeddings.create(model="cloud", input=["hi"]),
    "moderations": lambda client: client.moderations.create(model="cloud", input="hi"),
}


@pytest.mark.parametrize("how", NAMED)
def test_every_resource_is_paid_with_the_key_of_its_client(client: updraft.OpenAI, cloud: Cloud, how: str) -> None:
    other = NAMED[how](client, B)
    for resource in RESOURCES.values():
        resource(other)
        assert cloud.keys == [f"Bearer {B}"]
    with other.chat.completions.with_streaming_response.create(model="cloud", messages=USER) as response:
        response.read()
    assert cloud.keys == [f"Bearer {B}"]
    ask(client)
    assert cloud.keys == [f"Bearer {A}"], "the original keeps its own"


def test_a_key_of_one_request(client: updraft.OpenAI, cloud: Cloud) -> None:
    for headers in (
        {"Authorization": f"Bearer {B}"},
        {"x-api-key": B},
        {"API-Key": B},
        {"authorization": f"bearer {B}"},
    ):
        ask(client, extra_headers=headers)
        ask(client)
        assert cloud.keys == [f"Bearer {B}", f"Bearer {A}"]


def test_async_clients_and_callables(config: RouterConfig, cloud: Cloud) -> None:
    async def key() -> str:
        return B

    async def asked() -> None:
        async with updraft.AsyncOpenAI(config=config, max_retries=0) as client:
            for other in (client.with_options(api_key=B), client.with_options(api_key=key), assign(client, B)):
                await ask(other)
                assert cloud.keys == [f"Bearer {B}"]
            await ask(client, extra_headers={"Authorization": f"Bearer {B}"})
            await ask(client)
            assert cloud.keys == [f"Bearer {B}", f"Bearer {A}"]
        async with updraft.AsyncOpenAI(config=replace(config, cloud_api_key=None), api_key=key) as client:
            await ask(client)
            assert cloud.keys == [f"Bearer {B}"]

    asyncio.run(asked())


def test_keys_of_the_constructor(config: RouterConfig, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = iter([B, C])
    with updraft.OpenAI(config=config, api_key=lambda: next(keys)) as client:
        ask(client)
        ask(client)
        assert cloud.keys == [f"Bearer {B}", f"Bearer {C}"]
    with pytest.raises(ConfigurationError, match="api_key and cloud_api_key"):
        updraft.OpenAI(config=config, api_key=B, cloud_api_key=C)
    monkeypatch.setenv("OPENAI_API_KEY", C)
    monkeypatch.setenv("OPENAI_ADMIN_KEY", C)
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"Authorization: Bearer {C}")
    with updraft.OpenAI(config=config, api_key=B) as client:
        ask(client)
        assert cloud.keys == [f"Bearer {B}"], "keys in the environment are for OpenAI, not for any cloud"


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"Authorization": "Basic dXNlcjpwdw=="}, "authorization"),
        ({"Authorization": B}, "authorization"),
        ({"Authorization": "Bearer "}, "authorization"),
        ({"x-api-key": "two words"}, "x-api-key"),
        ({"Authorization": f"Bearer {B}", "x-api-key": C}, "x-api-key"),
        ({"x-goog-api-key": B}, "x-goog-api-key"),
        ({"Authorization": openai.Omit()}, "authorization"),
    ],
)
def test_invalid_keys_are_refused_by_name(
    client: updraft.OpenAI, cloud: Cloud, headers: dict[str, Any], name: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_headers=headers)
    assert caught.value.param == name
    assert not any(str(value) in str(caught.value) for value in headers.values() if len(str(value)) > 9)
    assert cloud.keys == []


def test_a_bare_request_of_the_client_uses_the_key_in_the_settings(client: updraft.OpenAI, cloud: Cloud) -> None:
    """openai's methods are not the only way to the endpoints: `client._client` sends no Authorization by itself."""
    body = {"model": "cloud", "messages": USER}
    client._client.post("/chat/completions", json=body).raise_for_status()
    client._client.post("/chat/completions", json=body, headers={"authorization": f"Bearer {B}"}).raise_for_status()
    assert cloud.keys == [f"Bearer {A}", f"Bearer {B}"]


def test_another_address_is_refused_by_name(client: updraft.OpenAI, cloud: Cloud) -> None:
    with pytest.raises(ConfigurationError, match="base_url"):
        client.with_options(base_url="https://other.example/v1")
    for url in ("https://other.example/v1", "http://updraft.invalid:81/v1", "https://updraft.invalid/v1"):
        other = client.copy()
        other.base_url = url
        with pytest.raises(openai.BadRequestError) as caught:
            ask(other)
        assert caught.value.param == "base_url"
    assert cloud.keys == []


def test_tenants_share_no_answers_and_no_sessions(config: RouterConfig, cloud: Cloud) -> None:
    cached = replace(config, cache=CacheSettings(max_mb=1.0))
    with updraft.OpenAI(config=cached, max_retries=0) as client:
        other = client.with_options(api_key=B)
        project = client.with_options(project="another")
        answers = [ask(each, seed=1).choices[0].message.content for each in (client, other, project) * 2]
        assert answers == ["1", "2", "3"] * 2
        assert [each.get("cookie") for each in cloud.seen] == [None] * 3
        assert cloud.keys == [f"Bearer {A}", f"Bearer {B}", f"Bearer {A}"]


def test_organization_and_project_go_along(client: updraft.OpenAI, cloud: Cloud) -> None:
    ask(client.with_options(organization="org-b", project="proj-b", api_key=B))
    [sent] = cloud.seen
    assert (sent["openai-organization"], sent["openai-project"]) == ("org-b", "proj-b")


def test_a_key_replaces_those_of_the_settings_in_whatever_place(config: RouterConfig, cloud: Cloud) -> None:
    keyed = replace(
        config,
        cloud_headers={"api-key": A, "X-Title": "Bot"},
        cloud_query={"key": A, "api-version": "1"},
        cloud_provider="openai",
    )
    with updraft.OpenAI(config=keyed, max_retries=0) as client:
        ask(client.with_options(api_key=B))
        [sent] = cloud.seen
        assert A not in str(sent)
        assert (sent["x-title"], sent[":path"]) == ("Bot", "/v1/chat/completions?api-version=1")


@pytest.mark.parametrize(("provider", "header"), [("anthropic", "x-api-key"), ("gemini", "x-goog-api-key")])
def test_providers_get_it_in_their_own_header(config: RouterConfig, cloud: Cloud, provider: str, header: str) -> None:
    cloud.status = 401
    with updraft.OpenAI(config=replace(config, cloud_provider=provider), max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            ask(client.with_options(api_key=B))
        [sent] = cloud.seen
        assert sent[header] == B
        assert A not in str(sent)
        assert "authorization" not in sent


def test_a_smaller_cloud_of_another_server_never_sees_it(config: RouterConfig, cloud: Cloud) -> None:
    with running_cloud() as elsewhere:
        middle_tiers = (
            CloudTierConfig(url=f"{elsewhere.url}/v1", model="medium", api_key=C),
            CloudTierConfig(url=f"{cloud.url}/small/v1", model="small", api_key=C),
        )
        with updraft.OpenAI(config=replace(config, middle_tiers=middle_tiers), max_retries=0) as client:
            other = client.with_options(api_key=B)
            with pytest.raises(openai.BadRequestError) as caught:
                other.chat.completions.create(model="medium", messages=USER)
            assert caught.value.param == "api_key"
            other.chat.completions.create(model="auto", messages=USER)
            other.chat.completions.create(model="small", messages=USER)
            assert (elsewhere.keys, cloud.keys) == ([], [f"Bearer {B}"] * 2)
            client.chat.completions.create(model="auto", messages=USER)
            assert (elsewhere.keys, cloud.keys) == ([f"Bearer {C}"], [])


def test_a_batch_of_another_key_is_refused(client: updraft.OpenAI) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "cloud"}}
    other = client.with_options(api_key=B)
    file = other.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    with pytest.raises(openai.BadRequestError) as caught:
        other.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert caught.value.param == "api_key"
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_background_response_keeps_its_key(config: RouterConfig, cloud: Cloud, tmp_path: Path) -> None:
    with updraft.OpenAI(config=replace(config, store=tmp_path / "store.sqlite3"), max_retries=0) as client:
        other = client.with_options(api_key=B)
        begun = other.responses.create(model="cloud", input="hi", background=True, stream=True)
        assert [event.type for event in begun][-1] == "response.completed"
        assert cloud.keys == [f"Bearer {B}"]


@pytest.mark.parametrize("key", [B, "k", "word"])
def test_key_is_in_no_output(
    client: updraft.OpenAI, config: RouterConfig, cloud: Cloud, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    caplog.set_level(logging.DEBUG)
    cloud.status = 401
    other = client.with_options(api_key=key)
    for stream in (False, True):
        with pytest.raises(openai.AuthenticationError) as caught:
            ask(other, stream=stream)
        assert (
            caught.value.message.endswith("Bearer [the API key]'}}") or "Bearer [the API key]" in caught.value.message
        )
    client.close()
    assert config.ledger is not None
    kept = b"".join(path.read_bytes() for path in config.ledger.parent.rglob("*") if path.is_file())
    if len(key) > 4:
        assert key not in caplog.text
        assert key.encode() not in kept


def test_the_daemon_keeps_its_callers_keys_to_itself(config: RouterConfig, cloud: Cloud) -> None:
    with serving(daemon_app(Router(config)), lifespan=True) as url:
        for headers in ({"authorization": f"Bearer {B}"}, {"x-api-key": B}, {"api-key": B}):
            body = {"model": "cloud", "messages": USER}
            answered = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)
            assert answered.status_code == 200, answered.text
            assert B not in str(cloud.seen)
            assert cloud.keys == [f"Bearer {A}"]


def test_two_authorizations_are_refused_by_every_server(config: RouterConfig, cloud: Cloud, gateway: Any) -> None:
    body, other = {"model": "cloud", "messages": USER}, ("authorization", "Bearer another")
    with serving(daemon_app(Router(config)), lifespan=True) as url:
        for server, key in ((url, B), (gateway.url, gateway.key)):
            for order in ([("authorization", f"Bearer {key}"), other], [other, ("authorization", f"Bearer {key}")]):
                refused = httpx.post(f"{server}/v1/chat/completions", json=body, headers=order, timeout=60)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "authorization")
                assert "Send only one" in refused.json()["error"]["message"]
    assert cloud.seen == []


def test_authorization_counts_if_x_api_key_differs(config: RouterConfig, cloud: Cloud, gateway: Any) -> None:
    body = {"model": "cloud", "messages": USER}
    with serving(daemon_app(Router(config)), lifespan=True) as url:
        keys = {"x-api-key": "another", "authorization": "Bearer one"}
        answered = httpx.post(f"{url}/v1/chat/completions", json=body, headers=keys, timeout=60)
        assert answered.json()["updraft"]["notes"] == ["header x-api-key: not forwarded"]
        assert cloud.keys == [f"Bearer {A}"]
    models = f"{gateway.url}/v1/models"
    keys["authorization"] = f"Bearer {gateway.key}"
    assert httpx.get(models, headers=keys).status_code == 200
    assert httpx.get(models, headers={"x-api-key": gateway.key, "authorization": "Bearer another"}).status_code == 401


def test_a_library_on_the_transport_is_told_apart_by_its_key_alone(config: RouterConfig, cloud: Cloud) -> None:
    http = updraft.transport(config)
    with openai.OpenAI(api_key=B, http_client=httpx_of_openai().Client(transport=http)) as client:
        ask(client)
        assert cloud.keys == [f"Bearer {A}"]


@pytest.mark.parametrize("kind", [updraft.OpenAI, updraft.AsyncOpenAI])
def test_websockets_of_a_client_leave_no_process(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would not use the transport: key and prompt would go to any host that claims the router's name."""
    resolved: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: resolved.append(host))
    with pytest.raises(ConfigurationError, match="websocket_base_url"):
        kind(local="pocket", websocket_base_url="wss://other.example/v1")
    client = kind(local="pocket", api_key="sk-tenant")
    for each in (client, client.with_options(api_key="sk-other")):
        for resource in (each.responses, each.realtime):
            with pytest.raises(UnsupportedFeatureError, match="updraft serve"):
                resource.connect(model="local")
        assert str(each.websocket_base_url).endswith(":0")
    assert resolved == []
