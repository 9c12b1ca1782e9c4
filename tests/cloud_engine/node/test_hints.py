"""Hints, vendors' tools and incomplete histories on every endpoint of a real node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

USER = {"role": "user", "content": "hi"}
HINTS: dict[str, Any] = {
    **{name: {"a": 1} for name in ("client_metadata", "context_management", "cache_control", "thinking")},
    **dict.fromkeys(("user", "service_tier", "prompt_cache_key", "think", "output_config"), "low"),
    "defer_loading": True,
    "metadata": {"a": "b"},
    "reasoning": {"effort": "low"},
}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/embeddings": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [65]},
}


@pytest.fixture(scope="module")
def client(nodes: list[str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=nodes[0], timeout=120) as client:
        yield client


def ask(client: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    sent = client.post(path, json={"model": "tiny", **body})
    assert sent.status_code == status, sent.text
    return sent.json()


@pytest.mark.parametrize("path", ENDPOINTS)
def test_hints_are_accepted(client: httpx.Client, path: str) -> None:
    ask(client, path, **ENDPOINTS[path], **HINTS)


def test_what_had_no_effect_is_noted(client: httpx.Client) -> None:
    tools = [{"type": "web_search"}]
    asked = {**ENDPOINTS["/v1/chat/completions"], "user": "ann", "metadata": {"a": "b"}, "tools": tools}
    assert ask(client, "/v1/chat/completions", **asked)["updraft"]["notes"] == [
        "metadata, user: no effect",
        "tools[0]: left out, 'web_search' is a tool of a vendor's servers",
    ]
    message = ask(client, "/v1/messages", **ENDPOINTS["/v1/messages"], metadata={"user_id": "ann"})
    assert message["updraft"]["notes"] == ["metadata: no effect"]
    completion = {**ENDPOINTS["/v1/completions"], "user": "ann", "think": True, "prompt_cache_key": "k"}
    assert ask(client, "/v1/completions", **completion)["updraft"]["notes"] == [
        "user, prompt_cache_key, think: no effect"
    ]
    streamed = client.post("/v1/completions", json={"model": "tiny", **completion, "stream": True}).text
    assert streamed.count("no effect") == 1
    assert "updraft" not in ask(client, "/v1/completions", **ENDPOINTS["/v1/completions"])
    refused = ask(client, "/v1/responses", 400, input="hi", max_output_tokens=2, text={"format": {"type": "xml"}})
    assert refused["error"]["param"] == "text.format.type"


def test_incomplete_histories_and_texts_for_booleans(client: httpx.Client) -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    asked = {**ENDPOINTS["/v1/chat/completions"], "stream": "false"}
    for turns in ([{"role": "assistant", "tool_calls": [call]}, {"role": "tool"}], [{"role": "assistant"}, USER]):
        assert ask(client, "/v1/chat/completions", **{**asked, "messages": turns})["choices"]
    assert ask(client, "/v1/responses", input="", max_output_tokens=2, stream="False")["output"] is not None
