"""The OpenAPI document is true to the daemon: requests made from it by schemathesis get answers that it describes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from itertools import cycle
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from router_fakes import ScriptedLocal, tiers
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.checks")
requests = pytest.importorskip("requests")  # which it calls with

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
_MODELS = cycle(("auto", "local", "cloud"))
_KNOWN = cycle((True, True, False))
_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
_UNHURRIED = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


async def _answer(request: Request) -> Response:
    """The description that every OpenAI-compatible server gives, whatever it is asked."""
    body, chat = await request.json(), "chat" in request.url.path
    message: dict[str, Any] = {"message": {"role": "assistant", "content": "yes"}} if chat else {"text": "yes"}
    piece: dict[str, Any] = {"delta": {"content": "yes"}} if chat else {"text": "yes"}
    kind = "chat.completion" if chat else "text_completion"
    shell = {"id": "c", "object": kind, "created": 1, "model": "big"}

    async def events() -> AsyncIterator[bytes]:
        choice = JSONResponse({**shell, "choices": [{"index": 0, "finish_reason": "stop", **piece}]})
        yield b"data: " + bytes(choice.body) + b"\n\ndata: [DONE]\n\n"

    if body.get("stream") is True:
        return StreamingResponse(events(), media_type="text/event-stream")
    return JSONResponse({**shell, "choices": [{"index": 0, "finish_reason": "stop", **message}], "usage": _USAGE})


async def _embed(request: Request) -> Response:
    data = [{"object": "embedding", "index": 0, "embedding": [1.0]}]
    usage = {"prompt_tokens": 1, "total_tokens": 1}
    return JSONResponse({"object": "list", "model": "big", "data": data, "usage": usage})


async def _other(request: Request) -> Response:
    return JSONResponse({"results": []})


class Described(NamedTuple):
    """The OpenAPI document, its daemon, and the connections to the daemon."""

    schema: Any
    url: str
    session: Any
    # What lies in the stores, by the placeholder that stands for it.
    known: dict[str, str]


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Described]:
    paths = [Route(f"/v1/{path}", _answer, methods=["POST"]) for path in ("chat/completions", "completions")]
    others = [Route("/v1/embeddings", _embed, methods=["POST"]), Route("/v1/{path:path}", _other, methods=["POST"])]
    with serving(Starlette(routes=[*paths, *others])) as cloud:
        folder = tmp_path_factory.mktemp("daemon")
        config = RouterConfig(
            cloud_url=cloud,
            cloud_model="big",
            confidence=0.5,
            ledger=folder / "ledger.sqlite3",
            store=folder / "answers.sqlite3",
            files=folder / "files",
        )
        with serving(daemon_app(Router(config, tiers(ScriptedLocal(), config))), lifespan=True) as url:
            document = httpx.get(f"{url}/openapi.json").json()
            with requests.Session() as session:
                yield Described(schemathesis.openapi.from_dict(document), url, session, _kept(url))


def _kept(url: str) -> dict[str, str]:
    """One of each kind of what is kept. The daemon answers batches that nobody awaits."""
    with httpx.Client(base_url=f"{url}/v1") as http:
        chat = {"model": "local", "messages": [{"role": "user", "content": "hi"}], "store": True}
        completion = http.post("/chat/completions", json=chat)
        response = http.post("/responses", json={"model": "local", "input": "hi", "store": True}).json()["id"]
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {**chat, "store": False}}
        form = {"files": {"file": ("a.jsonl", json.dumps(line).encode())}, "data": {"purpose": "batch"}}
        file = http.post("/files", **form).json()["id"]
        about = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = http.post("/batches", json=about).json()["id"]
    request = completion.headers["x-updraft-request-id"]
    kept = {"completion": completion.json()["id"], "response": response, "file": file, "batch": batch, "id": request}
    return {**kept, "model": "local", "chart": "savings"}


def check_all(described: Described, examples: int, subtests: pytest.Subtests) -> None:
    """Every operation, each reported when it ends. Whether a stranger's value is refused is for the tier that answers
    to say, and not checked here.
    """
    for described_operation in described.schema.get_all_operations():
        operation = described_operation.ok()
        if operation.path.startswith(("/updraft/models", "/api/pull")):
            continue  # they fetch and delete models

        @settings(max_examples=examples, database=None, **_UNHURRIED)
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = next(_MODELS)
            if case.method != "DELETE" and next(_KNOWN):
                case.path_parameters = {
                    name: described.known.get(name, value) for name, value in case.path_parameters.items()
                }
            case.call_and_validate(base_url=described.url, session=described.session, checks=CHECKS)

        with subtests.test(operation.label):
            check()


def test_parameters_forms_and_streams_are_those_of_the_routes(described: Described) -> None:
    for path, operations in described.schema.raw_schema["paths"].items():
        if "get" not in operations:
            continue
        told = {each["name"] for each in operations["get"]["parameters"] if each["in"] == "query"}
        answer = httpx.get(described.url + path.replace("{chart}", "curve"), params={"nobody's": "1"})
        _, _, known = answer.text.partition("Unknown query parameter")[2].partition(" Known: ")
        assert told == set(filter(None, known.partition(".")[0].split(", "))), path
    assert httpx.post(f"{described.url}/v1/files", json={}).json()["error"]["code"] == "invalid_form"
    assert list(_content(described, "/v1/files", "requestBody")) == ["multipart/form-data"]
    hello = {"model": "local", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    for path in ("/api/chat", "/v1/chat/completions"):
        kind = httpx.post(described.url + path, json=hello).headers["content-type"].partition(";")[0]
        assert kind in _content(described, path, "responses", "200"), path


def _content(described: Described, path: str, *keys: str) -> dict[str, Any]:
    node = described.schema.raw_schema["paths"][path]["post"]
    for key in keys:
        node = node[key]
    return node["content"]


def test_ten_requests_an_operation(described: Described, subtests: pytest.Subtests) -> None:
    check_all(described, 10, subtests)


@pytest.mark.soak
def test_two_thousand_requests_an_operation(described: Described, subtests: pytest.Subtests) -> None:
    check_all(described, 2000, subtests)
