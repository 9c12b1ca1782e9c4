"""A cloud that refuses hints on reasoning or metadata is asked again without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from router_fakes import tiers
from scripted_provider import ScriptedProvider, running_provider
from serving import serving
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app

USER = {"role": "user", "content": "Hi"}
ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}],
}
MESSAGE = {
    "id": "m",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "Hello."}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 1, "output_tokens": 1},
}
NOTE = "reasoning: left out, because the model refuses it"
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [USER], "reasoning_effort": "high"}),
    ("/v1/chat/completions", {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 2000}}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 50, "output_config": {"effort": "high"}}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 50, "thinking": {"type": "enabled", "budget_tokens": 2000}}),
    ("/v1/responses", {"input": "Hi", "reasoning": {"effort": "high"}}),
    ("/api/chat", {"messages": [USER], "stream": False, "think": "high"}),
]


def refusal(field: str) -> dict[str, Any]:
    return {"error": {"message": f"Unsupported parameter: '{field}'.", "type": "invalid_request_error", "param": field}}


@pytest.fixture
def provider() -> Iterator[ScriptedProvider]:
    with running_provider() as provider:
        yield provider


@pytest.fixture(params=["openai"])
def url(request: pytest.FixtureRequest, provider: ScriptedProvider) -> Iterator[str]:
    config = RouterConfig(
        local=None, ledger=None, cloud_url=provider.url, cloud_model="m", cloud_provider=request.param
    )
    with serving(daemon_app(Router(config, tiers(None, config))), lifespan=True) as url:
        yield url


def ask(url: str, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}{path}", json={"model": "cloud", **body}, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_refused_hints_on_reasoning_are_left_out_from_then_on(
    url: str, provider: ScriptedProvider, path: str, body: dict[str, Any]
) -> None:
    field = "thinking" if "thinking" in body and path == "/v1/chat/completions" else "reasoning_effort"
    provider.says(refusal(field), 400)
    for tries in (2, 3):
        provider.says(ANSWER)
        assert NOTE in ask(url, path, **body)["updraft"]["notes"]
        assert len(provider.asked) == tries, "the second request needs no retry"
    assert field in provider.asked[0].body and field not in provider.asked[1].body


def test_other_values_are_sent_again(url: str, provider: ScriptedProvider) -> None:
    provider.says(refusal("reasoning_effort"), 400)
    for effort in ("xhigh", "low"):
        provider.says(ANSWER)
        ask(url, "/v1/chat/completions", messages=[USER], reasoning_effort=effort)
    assert [asked.body.get("reasoning_effort") for asked in provider.asked] == ["xhigh", None, "low"]


def test_other_refusals_name_the_callers_field(url: str, provider: ScriptedProvider) -> None:
    for _ in range(2):
        provider.says(refusal("reasoning_effort"), 400)
    refused = ask(url, "/v1/messages", 400, **ASKED[2][1])
    assert refused["error"]["param"] == "output_config.effort"
    assert len(provider.asked) == 2
    provider.says(refusal("temperature"), 400)
    assert ask(url, "/v1/chat/completions", 400, **ASKED[0][1])["error"]["param"] == "temperature"
    assert len(provider.asked) == 3


@pytest.mark.parametrize("url", ["anthropic"], indirect=True)
def test_a_request_in_the_clouds_own_api_keeps_its_format(url: str, provider: ScriptedProvider) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object", "properties": {}}}
    provider.says({"type": "error", "error": {"type": "invalid_request_error", "message": "no adaptive thinking"}}, 400)
    provider.says(MESSAGE)
    options = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high", "format": wanted}}
    told = ask(url, "/v1/messages", messages=[USER], max_tokens=50, **options)
    assert NOTE in told["updraft"]["notes"]
    first, second = (asked.body for asked in provider.asked)
    assert (first["thinking"], first["output_config"]) == (options["thinking"], options["output_config"])
    assert "thinking" not in second and second["output_config"] == {"format": wanted}


def test_metadata_is_a_hint_unless_the_answer_is_stored(url: str, provider: ScriptedProvider) -> None:
    asked = {"messages": [USER], "metadata": {"turn": 1}}
    provider.says(refusal("metadata.turn"), 400)
    provider.says(ANSWER)
    notes = ask(url, "/v1/chat/completions", **asked)["updraft"]["notes"]
    assert notes == ["metadata: left out, because the model refuses it"]
    assert [body.body.get("metadata") for body in provider.asked] == [{"turn": 1}, None]
    provider.says(refusal("metadata.turn"), 400)
    assert ask(url, "/v1/chat/completions", 400, **asked, store=True)["error"]["param"] == "metadata.turn"
