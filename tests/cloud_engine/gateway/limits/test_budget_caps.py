"""Caps that a budget writes into requests: nodes that have less room, or no such field, answer all the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from gateway_keys import make_key
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from updraft.accounting.token_estimate import AnswerSize
from updraft.cloud_engine.gateway.access.principal import Limits

COMPLETION = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 20, "completion_tokens": 5},
}
STREAM = (
    b'data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
CONTEXT = 8192
LIMITS = ("max_tokens", "max_completion_tokens")
#: How servers refuse a limit that does not fit their context.
TOO_LARGE = {
    "vllm": (400, {"message": "'max_tokens' or 'max_completion_tokens' is too large: 12498.", "code": 400}),
    "older vllm": (400, {"message": "This model's maximum context length is 8192 tokens. You requested 12518 tokens."}),
    "updraft": (
        400,
        {
            "message": "The context is 8192 tokens, but the prompt has 23 and the answer needs 12498.",
            "param": "prompt",
            "code": "context_length_exceeded",
        },
    ),
    "tgi": (422, {"message": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8192."}),
}


@dataclass
class Node:
    """Refuses limits above its context, and the fields in `unknown`, with the error that the test sets."""

    listed: int | None = None
    status: int = 400
    error: dict[str, Any] = field(default_factory=dict[str, Any])
    unknown: tuple[str, ...] = ()
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def app(self) -> Starlette:
        routes = [Route("/v1/models", self.models), Route("/{rest:path}", self.answer, methods=["POST"])]
        return Starlette(routes=routes)

    async def models(self, _request: Request) -> Response:
        cards = [{"id": "big", "owned_by": "x"}, {"id": "short", "owned_by": "x", "max_model_len": CONTEXT}]
        return JSONResponse({"data": cards})

    async def answer(self, request: Request) -> Response:
        self.bodies.append(body := await request.json())
        for name in self.unknown:
            if name in body:
                error = {"message": f"Unsupported parameter: '{name}' is not supported.", "param": name}
                return JSONResponse({"error": error}, 400)
        if max((body.get(name) or 0 for name in LIMITS), default=0) > CONTEXT - 20:
            return JSONResponse({"error": self.error}, self.status)
        return Response(STREAM, media_type="text/event-stream") if body.get("stream") else JSONResponse(COMPLETION)

    @property
    def limits(self) -> list[dict[str, int]]:
        return [{name: body[name] for name in LIMITS if name in body} for body in self.bodies]


@dataclass
class Setup:
    url: str
    key: str
    node: Node

    def ask(self, model: str = "big", **fields: Any) -> httpx.Response:
        self.node.bodies.clear()
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def setup(spawned: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("caps")
    prices = [f'[prices.models."{name}"]\ninput = 0.25\noutput = 2.0\n' for name in ("big", "short")]
    (folder / "prices.toml").write_text("".join(prices))
    key = make_key(folder / "keys", "app", limits=Limits(usd_per_day=0.1))  # less than 50,000 tokens
    node = Node()
    with serving(node.app()) as url:
        files = ("--keys", folder / "keys", "--ledger", folder / "usage.sqlite", "--prices", folder / "prices.toml")
        command = ("-m", "updraft", "gateway", "--port", "0", "--node", url, "--exit-with-parent")
        with spawned(*command, *map(str, files)) as process:
            yield Setup(process.url, key, node)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("server", TOO_LARGE)
def test_a_request_whose_cap_is_too_large_for_the_node_is_sent_without_it(
    setup: Setup, server: str, stream: bool
) -> None:
    setup.node.status, setup.node.error = TOO_LARGE[server]
    answer = setup.ask(stream=stream)
    assert answer.status_code == 200, answer.text
    assert "Hi" in answer.text and "x-updraft-notes" not in answer.headers
    capped, uncapped = setup.node.limits
    assert CONTEXT < capped["max_tokens"] < 50_000 and not uncapped


def test_a_node_that_knows_another_limit_gets_the_cap_there(setup: Setup) -> None:
    setup.node.unknown = ("max_tokens",)
    setup.node.status, setup.node.error = TOO_LARGE["vllm"]
    try:
        answer = setup.ask()
    finally:
        setup.node.unknown = ()
    assert answer.status_code == 200, answer.text
    first, second, third = setup.node.limits
    assert (first, third) == ({"max_tokens": second["max_completion_tokens"]}, {})


def test_a_refusal_with_another_reason_reaches_the_client(setup: Setup) -> None:
    setup.node.status, setup.node.error = 400, {"message": "Bad messages.", "param": "messages"}
    answer = setup.ask()
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "Bad messages.")
    assert len(setup.node.bodies) == 1


def test_the_context_of_the_node_is_the_most_that_a_request_reserves(setup: Setup) -> None:
    """The budget pays for the longest answer that the context holds, so no cap is needed."""
    answers = [setup.ask("short", stream=stream) for stream in (False, True)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert setup.node.limits == [{}]
    assert all("x-updraft-notes" not in answer.headers for answer in answers)


def test_the_context_bounds_each_answer() -> None:
    assert AnswerSize(None, 2, context=8192).most(None) == AnswerSize(50_000, 2, context=8192).most(None) == 16_384
    assert (AnswerSize(100, context=8192).most(None), AnswerSize(context=8192).most(4096)) == (100, 4096)
    assert AnswerSize(None, context=512).least == 512
    assert AnswerSize(None, context=10**6).most(None) == AnswerSize(None).most(None)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("chat/completions", {"max_tokens": 5, "max_completion_tokens": -1}, "max_completion_tokens"),
        ("chat/completions", {"max_tokens": 5, "max_new_tokens": 0}, "max_new_tokens"),
        ("chat/completions", {"max_tokens": 5, "options": {"num_predict": -1}}, "options.num_predict"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "a", "echo": False, "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "a", "echo": True, "max_tokens": -1}, "max_tokens"),
        ("responses", {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ("messages", {"max_tokens": 0}, "max_tokens"),
        ("messages", {"max_tokens": 0.0}, "max_tokens"),
    ],
)
def test_a_limit_below_one_is_refused(setup: Setup, path: str, fields: dict[str, Any], param: str) -> None:
    """Some servers read 0 as "no limit"."""
    setup.node.bodies.clear()
    body = {"model": "big", "messages": [{"role": "user", "content": "hi"}], **fields}
    headers = {"authorization": f"Bearer {setup.key}"}
    answer = httpx.post(f"{setup.url}/v1/{path}", json=body, headers=headers, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_value"), answer.text
    assert error["message"].startswith(f"{param} must be at least ")
    assert not setup.node.bodies


@pytest.mark.parametrize("scored", [{"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}])
def test_completions_that_only_score_their_prompt_reach_the_node(setup: Setup, scored: dict[str, Any]) -> None:
    setup.node.bodies.clear()
    body = {"model": "big", "prompt": "a", "max_tokens": 0, **scored}
    headers = {"authorization": f"Bearer {setup.key}"}
    httpx.post(f"{setup.url}/v1/completions", json=body, headers=headers, timeout=60)
    (sent,) = setup.node.bodies
    assert {**sent, **body} == sent
