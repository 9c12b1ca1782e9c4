"""The OpenAPI document is true to the daemon: requests made from it by schemathesis get answers that it describes."""

from __future__ import annotations

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
    """The document, the daemon behind it, and the connections there."""

    schema: Any
    url: str
    session: Any


@pytest.fixture(scope="module")
def described() -> Iterator[Described]:
    paths = [Route(f"/v1/{path}", _answer, methods=["POST"]) for path in ("chat/completions", "completions")]
    others = [Route("/v1/embeddings", _embed, methods=["POST"]), Route("/v1/{path:path}", _other, methods=["POST"])]
    with serving(Starlette(routes=[*paths, *others])) as cloud:
        config = RouterConfig(cloud_url=cloud, cloud_model="big", ledger=None)
        with serving(daemon_app(Router(config, tiers(ScriptedLocal(), config))), lifespan=True) as url:
            document = httpx.get(f"{url}/openapi.json").json()
            with requests.Session() as session:
                yield Described(schemathesis.openapi.from_dict(document), url, session)


def check_all(described: Described, examples: int) -> None:
    """Every operation; what fails is told of all of them together. Whether a stranger's value is refused is for the
    tier that answers to say, and not checked here.
    """
    failures: list[str] = []
    for found in described.schema.get_all_operations():
        operation = found.ok()
        if operation.path.startswith("/updraft/"):
            continue  # the page's own: they fetch and delete models

        @settings(max_examples=examples, database=None, **_UNHURRIED)
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = next(_MODELS)
            case.call_and_validate(base_url=described.url, session=described.session, checks=CHECKS)

        try:
            check()
        except (AssertionError, BaseExceptionGroup, schemathesis.errors.SchemathesisError) as error:
            failures.append(f"{operation.label}: {error}"[:2000])
    assert not failures, "\n\n".join(failures)


def test_thirty_requests_an_operation(described: Described) -> None:
    check_all(described, 30)


@pytest.mark.soak
def test_two_thousand_requests_an_operation(described: Described) -> None:
    check_all(described, 2000)
