"""Usage in the forms of several clouds, wherever their answers carry it: one count for replies and prices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from provider_daemons import running_daemons
from scripted_provider import ScriptedProvider, running_provider
from updraft.accounting.prices import Price
from updraft.router.accounting.prices import Prices
from updraft.router.tiers.providers.gemini import ContentEvents

HEAD = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
HELLO = [{"role": "user", "content": "hello"}]
STANDARD = {"prompt_tokens": 1000, "completion_tokens": 5, "total_tokens": 1005}
#: Usage of 1,000 prompt tokens, of which 900 were cached, and 5 completion tokens.
FORMS: dict[str, dict[str, Any]] = {
    "OpenAI": {**STANDARD, "prompt_tokens_details": {"cached_tokens": 900}},
    "DeepSeek": {**STANDARD, "prompt_cache_hit_tokens": 900, "prompt_cache_miss_tokens": 100},
    "Moonshot": {**STANDARD, "cached_tokens": 900},
    "Responses": {"input_tokens": 1000, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 900}},
    "Anthropic": {"input_tokens": 100, "output_tokens": 5, "cache_read_input_tokens": 900},
    "Gemini": {"promptTokenCount": 1000, "candidatesTokenCount": 5, "cachedContentTokenCount": 900},
}
#: Fields of the last chunk, or of the answer, that carry a usage.
PLACES: dict[str, Any] = {
    "usage": lambda usage: {"usage": usage},
    "x_groq": lambda usage: {"x_groq": {"id": "r", "usage": usage}},
    "nested": lambda usage: {"usage": None, "metadata": {"provider": [{"response": {"usage": {"usage": usage}}}]}},
    "choice": lambda usage: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "usage": usage}]},
}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
    "/api/chat": {"messages": HELLO},
}
PRICES = Prices(models={"m": Price(1, 2, cached_input=0.1)})


@pytest.fixture(scope="module")
def cloud() -> Iterator[ScriptedProvider]:
    with running_provider() as provider:
        yield provider


@pytest.fixture(scope="module")
def daemons(cloud: ScriptedProvider) -> Iterator[dict[str, str]]:
    """URLs of daemons, by the provider of their cloud."""
    with running_daemons(cloud, "openai", "anthropic", "gemini", prices=PRICES) as urls:
        yield urls


def ask(url: str, path: str, *, stream: bool) -> list[dict[str, Any]]:
    """Return the events of an answer. A whole answer is one event."""
    body = {"model": "cloud", "stream": stream, **ASKED[path]}
    if stream and path == "/v1/chat/completions":
        body["stream_options"] = {"include_usage": True}
    reply = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines()] if stream else [reply.text]
    return [json.loads(line) for line in lines if line.startswith("{")]


def counts_of(events: list[dict[str, Any]], path: str) -> tuple[int, ...]:
    """Return prompt, cached and completion tokens by the rules of the endpoint, and what the answer cost."""
    events = [event.get("response", event) for event in events]
    cost = [event["updraft"]["cost_usd"] for event in events if "updraft" in event][-1]
    if path == "/api/chat":
        return events[-1]["prompt_eval_count"], events[-1]["eval_count"], cost
    usage = [event["usage"] for event in events if event.get("usage")][-1]
    if path == "/v1/messages":
        cached, stored = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        return usage["input_tokens"] + cached + stored, usage["output_tokens"], cost, cached, stored
    names = ("prompt", "completion") if path == "/v1/chat/completions" else ("input", "output")
    read, written = (usage[f"{name}_tokens"] for name in names)
    details = usage[f"{names[0]}_tokens_details"]
    assert usage["total_tokens"] == read + written
    return read, written, cost, details["cached_tokens"], details.get("cache_write_tokens", 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    ("form", "place"), [*((form, "usage") for form in FORMS), *(("OpenAI", place) for place in PLACES)]
)
def test_every_form_in_every_place(
    cloud: ScriptedProvider, daemons: dict[str, str], form: str, place: str, path: str, stream: bool
) -> None:
    reported = PLACES[place](FORMS[form])
    if stream:
        choices = [{"index": 0, "delta": {"content": "Yes."}, "finish_reason": None}]
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], **reported}
        cloud.says(
            "".join(f"data: {json.dumps(HEAD | each)}\n\n" for each in ({"choices": choices}, end)) + "data: [DONE]\n\n"
        )
    else:
        choice = {"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}
        (given,) = reported.pop("choices", [{}])
        cloud.says({**HEAD, "choices": [{**given, **choice}], **reported})
    counts = counts_of(ask(daemons["openai"], path, stream=stream), path)
    assert counts[:3] == (1000, 5, pytest.approx((100 + 90 + 10) / 1e6))
    assert counts[3:] in ((), (900, 0))


def test_a_usage_in_several_events(cloud: ScriptedProvider, daemons: dict[str, str]) -> None:
    """The first event has the prompt, the last one the answer."""
    delta = {"index": 0, "delta": {"content": "Yes."}, "finish_reason": None}
    first = {"choices": [delta], "usage": {"input_tokens": 100, "cache_read_input_tokens": 900}}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"output_tokens": 5}}
    cloud.says("".join(f"data: {json.dumps(HEAD | each)}\n\n" for each in (first, last)) + "data: [DONE]\n\n")
    counts = counts_of(ask(daemons["openai"], "/v1/messages", stream=True), "/v1/messages")
    assert counts == (1000, 5, pytest.approx(200 / 1e6), 900, 0)


@pytest.mark.parametrize("path", ASKED)
def test_a_final_usage_of_zeros(cloud: ScriptedProvider, daemons: dict[str, str], path: str) -> None:
    zeros = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    first = {"choices": [{"index": 0, "delta": {"content": "Yes."}, "finish_reason": None}], "usage": FORMS["OpenAI"]}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": zeros}
    cloud.says("".join(f"data: {json.dumps(HEAD | each)}\n\n" for each in (first, end)) + "data: [DONE]\n\n")
    counts = counts_of(ask(daemons["openai"], path, stream=True), path)
    assert counts[:3] == (1000, 5, pytest.approx((100 + 90 + 10) / 1e6))


GEMINI = {
    **{"promptTokenCount": 1000, "cachedContentTokenCount": 900, "candidatesTokenCount": 2},
    **{"thoughtsTokenCount": 3, "totalTokenCount": 1005},
}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_gemini_reports_usage_in_any_event(
    cloud: ScriptedProvider, daemons: dict[str, str], path: str, place: int
) -> None:
    texts = [{"content": {"parts": [{"text": text}]}} for text in ("Ye", "s.")]
    made = [{"candidates": [texts[0]]}, {"candidates": [{**texts[1], "finishReason": "STOP"}]}, {"modelVersion": "m"}]
    made[place]["usageMetadata"] = GEMINI
    cloud.says("".join(f"data: {json.dumps(each)}\n\n" for each in made))
    counts = counts_of(ask(daemons["gemini"], path, stream=True), path)
    assert counts[:3] == (1000, 5, pytest.approx((100 + 90 + 10) / 1e6))


@pytest.mark.parametrize("path", ASKED)
def test_gemini_reports_a_total_alone(cloud: ScriptedProvider, daemons: dict[str, str], path: str) -> None:
    usage = {name: GEMINI[name] for name in ("promptTokenCount", "cachedContentTokenCount", "totalTokenCount")}
    candidate = {"content": {"parts": [{"text": "Yes."}]}, "finishReason": "STOP"}
    cloud.says(f"data: {json.dumps({'candidates': [candidate], 'usageMetadata': usage})}\n\n")
    counts = counts_of(ask(daemons["gemini"], path, stream=True), path)
    assert counts[:3] == (1000, 5, pytest.approx((100 + 90 + 10) / 1e6))


@pytest.mark.parametrize("path", ASKED)
def test_gemini_without_a_finish_reason(cloud: ScriptedProvider, daemons: dict[str, str], path: str) -> None:
    cloud.says({"candidates": [{"content": {"parts": [{"text": "Yes."}]}}], "usageMetadata": GEMINI})
    counts = counts_of(ask(daemons["gemini"], path, stream=False), path)
    assert counts[:3] == (1000, 5, pytest.approx((100 + 90 + 10) / 1e6))


def test_gemini_reports_the_usage_of_a_stream_that_the_caller_leaves() -> None:
    events, chunks = ContentEvents(), list[dict[str, Any]]()
    text = {"content": {"parts": [{"text": "Yes."}]}}
    for usage in ({"promptTokenCount": 1000, "totalTokenCount": 1000}, GEMINI):
        chunks += events.read({"candidates": [text], "usageMetadata": usage})
    assert len({chunk["id"] for chunk in chunks}) == 1
    early, late = (chunk["usage"] for chunk in chunks if "usage" in chunk)
    assert early == {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 0}}
    assert (late["prompt_tokens"], late["completion_tokens"]) == (1000, 5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_tokens_written_to_the_cache(cloud: ScriptedProvider, daemons: dict[str, str], path: str, stream: bool) -> None:
    usage = {"input_tokens": 100, "cache_read_input_tokens": 800, "cache_creation_input_tokens": 100}
    text = {"type": "text", "text": "Yes."}
    message: dict[str, Any] = {"id": "m1", "type": "message", "role": "assistant", "model": "m", "content": [text]}
    ended = {"stop_reason": "end_turn", "stop_sequence": None}
    if stream:
        begun = {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
        made = [
            {"type": "message_start", "message": begun},
            {"type": "content_block_start", "index": 0, "content_block": text},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": ended, "usage": {"output_tokens": 5}},
            {"type": "message_stop"},
        ]
        cloud.says("".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in made))
    else:
        cloud.says({**message, **ended, "usage": {**usage, "output_tokens": 5}})
    counts = counts_of(ask(daemons["anthropic"], path, stream=stream), path)
    assert counts[:3] == (1000, 5, pytest.approx((100 + 80 + 125 + 10) / 1e6))
    assert counts[3:] in ((), (800, 100))


def test_citations_beside_the_usage_reach_clients_that_want_no_usage(
    cloud: ScriptedProvider, daemons: dict[str, str]
) -> None:
    text = {"choices": [{"index": 0, "delta": {"content": "Yes."}, "finish_reason": None}]}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    cited = {"choices": [], "usage": STANDARD, "citations": ["https://example.com"]}
    cloud.says("".join(f"data: {json.dumps(HEAD | each)}\n\n" for each in (text, end, cited)) + "data: [DONE]\n\n")
    body = {"model": "cloud", "stream": True, "messages": HELLO}
    reply = httpx.post(f"{daemons['openai']}/v1/chat/completions", json=body, timeout=60)
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert [event["citations"] for event in events if "citations" in event] == [["https://example.com"]]
    assert not any(event.get("usage") for event in events)


WRITES: dict[str, dict[str, Any]] = {
    "Anthropic": {
        "input_tokens": 100,
        "output_tokens": 5,
        "cache_creation_input_tokens": 900,
        "cache_creation": {"ephemeral_5m_input_tokens": 400, "ephemeral_1h_input_tokens": 500},
    },
    "OpenRouter": {**STANDARD, "prompt_tokens_details": {"cache_write_tokens": 900, "cached_tokens": 0}},
    "Qwen": {**STANDARD, "prompt_tokens_details": {"cache_creation_input_tokens": 900, "cached_tokens": 0}},
}


@pytest.mark.parametrize(("form", "cost"), [("Anthropic", 100 + 500 + 1000), ("OpenRouter", 1225), ("Qwen", 1225)])
@pytest.mark.parametrize("path", ASKED)
def test_cache_writes_cost_more_than_plain_input(
    cloud: ScriptedProvider, daemons: dict[str, str], path: str, form: str, cost: int
) -> None:
    usage = WRITES[form]
    if form == "Anthropic":
        about = {"id": "m1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn"}
        cloud.says({**about, "content": [{"type": "text", "text": "Yes."}], "usage": usage})
    else:
        choice = {"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}
        cloud.says({**HEAD, "choices": [choice], "usage": usage})
    (answer,) = ask(daemons["anthropic" if form == "Anthropic" else "openai"], path, stream=False)
    counts = counts_of([answer], path)
    assert counts[:3] == (1000, 5, pytest.approx((cost + 10) / 1e6))
    assert counts[3:] in ((), (0, 900))
    if path == "/v1/messages":
        hour = 500 if form == "Anthropic" else 0
        by_time = {"ephemeral_5m_input_tokens": 900 - hour, "ephemeral_1h_input_tokens": hour}
        assert answer["usage"]["cache_creation"] == by_time


@pytest.mark.parametrize("stream", [False, True])
def test_a_blocked_prompt_has_no_answer(cloud: ScriptedProvider, daemons: dict[str, str], stream: bool) -> None:
    url, path = daemons["gemini"], "/v1/chat/completions"
    blocked = {"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 1000}}
    cloud.says(f"data: {json.dumps(blocked)}\n\n" if stream else blocked)
    (about,) = [event["updraft"] for event in ask(url, path, stream=stream) if "updraft" in event]
    assert about["cost_usd"] == pytest.approx(0.001)
