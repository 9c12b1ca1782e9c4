"""Gemini's generateContent, as it is documented: requests, answers, streams and errors, over sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_provider import CALL, IMAGE, TALK, TOOL, Ask, ScriptedProvider, deltas, events
from updraft.protocol.errors import ConfigurationError
from updraft.router.config import RouterConfig
from updraft.router.tiers.failures import CloudFailure

NATIVE = {"cloud_provider": "gemini", "cloud_model": "gemini-3-flash"}


def answer(*parts: dict[str, Any], finish: str | None = "STOP") -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": list(parts)}, "index": 0}
    return {
        "candidates": [candidate if finish is None else {**candidate, "finishReason": finish}],
        "usageMetadata": {
            "promptTokenCount": 12,
            "candidatesTokenCount": 4,
            "thoughtsTokenCount": 3,
            "totalTokenCount": 19,
        },
        "modelVersion": "gemini-x",
        "responseId": "r1",
    }


def test_a_request_with_everything(provider: ScriptedProvider, ask: Ask) -> None:
    provider.says(answer({"text": "ok"}))
    signed = {**CALL, "extra_content": {"google": {"thought_signature": "sig"}}}
    talk = [*TALK[:2], {**TALK[2], "tool_calls": [signed, {**CALL, "id": "call_2"}]}, *TALK[3:]]
    ask(
        NATIVE,
        messages=talk,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        stop=["END"],
        seed=3,
        top_p=0.9,
        max_tokens=50,
        reasoning_effort="low",
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    )
    (asked,) = provider.asked
    assert asked.path == "/v1beta/models/gemini-3-flash:generateContent"
    assert asked.headers["x-goog-api-key"] == "sk-secret-1"
    call = {"name": "weather", "args": {"city": "Oslo"}}
    assert asked.body == {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {
                "role": "user",
                "parts": [
                    {"text": "And here?"},
                    {"inlineData": {"mimeType": "image/png", "data": IMAGE.partition(",")[2]}},
                ],
            },
            {
                "role": "model",
                "parts": [
                    {"text": "I look."},
                    {"functionCall": {"id": "call_1", **call}, "thoughtSignature": "sig"},
                    {"functionCall": {"id": "call_2", **call}},
                ],
            },
            {
                "role": "user",
                "parts": [
                    {"functionResponse": {"id": "call_1", "name": "weather", "response": {"result": "rain"}}},
                    {"functionResponse": {"id": "call_2", "name": "weather", "response": {"sky": "blue"}}},
                    {"text": "So?"},
                ],
            },
        ],
        "generationConfig": {
            "maxOutputTokens": 50,
            "topP": 0.9,
            "seed": 3,
            "stopSequences": ["END"],
            "responseMimeType": "application/json",
            "responseJsonSchema": {"type": "object"},
            "thinkingConfig": {"thinkingLevel": "low", "includeThoughts": True},
        },
        "tools": [
            {
                "functionDeclarations": [
                    {
                        "name": "weather",
                        "description": "Of a city.",
                        "parametersJsonSchema": {"type": "object", "properties": {}},
                    }
                ]
            }
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["weather"]}},
    }


def test_empty_turns_are_left_out(provider: ScriptedProvider, ask: Ask) -> None:
    provider.says(answer({"text": "Yes."}))
    turns = [("system", ""), ("user", "one"), ("assistant", ""), ("user", "two")]
    ask(NATIVE, messages=[{"role": role, "content": text} for role, text in turns])
    body = provider.asked[-1].body
    assert body["contents"] == [{"role": "user", "parts": [{"text": "one"}, {"text": "two"}]}]
    assert "systemInstruction" not in body


def test_an_answer_becomes_a_completion(provider: ScriptedProvider, ask: Ask) -> None:
    call = {"functionCall": {"name": "weather", "args": {"city": "Oslo"}}, "thoughtSignature": "sig"}
    provider.says(answer({"text": "Hm.", "thought": True}, {"text": "Look."}, call))
    done = ask(NATIVE)
    choice = done["choices"][0]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("Look.", "Hm.")
    (made,) = choice["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"city": "Oslo"}
    assert made["id"] and made["extra_content"] == {"google": {"thought_signature": "sig"}}
    assert choice["finish_reason"] == "tool_calls"
    assert (done["usage"]["prompt_tokens"], done["usage"]["completion_tokens"]) == (12, 7), "thoughts are billed"


@pytest.mark.parametrize(
    "counts", [{"candidatesTokenCount": -4}, {"candidatesTokenCount": 0, "thoughtsTokenCount": -3}]
)
def test_impossible_counts_are_no_usage(provider: ScriptedProvider, ask: Ask, counts: dict[str, int]) -> None:
    usage = {"promptTokenCount": 12, **counts}
    provider.says({**answer({"text": "Hi."}), "usageMetadata": usage})
    provider.says(events({**answer({"text": "Hi."}), "usageMetadata": usage}))
    assert "completion_tokens" not in ask(NATIVE)["usage"]
    assert "completion_tokens" not in ask(NATIVE, stream=True)[-1]["usage"]


def test_an_answer_without_a_model_names_none(provider: ScriptedProvider, ask: Ask) -> None:
    provider.says({name: value for name, value in answer({"text": "Hi."}).items() if name != "modelVersion"})
    assert ask(NATIVE).get("model") in ("", NATIVE["cloud_model"])


def test_a_stream(provider: ScriptedProvider, ask: Ask) -> None:
    call = {"functionCall": {"id": "c1", "name": "weather", "args": {}}}
    provider.says(
        events(
            answer({"text": "Hm.", "thought": True}, finish=None),
            answer({"text": "Hel"}, finish=None),
            answer({"text": "lo"}, call, finish=None),
            answer({"text": ""}),
        )
    )
    chunks = ask(NATIVE, stream=True)
    assert provider.asked[0].path.endswith(":streamGenerateContent?alt=sse")
    assert deltas(chunks, "content") == ["Hel", "lo"]
    assert deltas(chunks, "reasoning_content") == ["Hm."]
    assert deltas(chunks, "tool_calls") == [
        [{"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    ]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["total_tokens"] == 19


def test_filtered_answers(provider: ScriptedProvider, ask: Ask) -> None:
    provider.says(answer(finish="SAFETY"))
    provider.says({"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}, "usageMetadata": {"promptTokenCount": 1}})
    for _ in range(2):
        assert ask(NATIVE)["choices"][0]["finish_reason"] == "content_filter"


def test_a_cut_stream(provider: ScriptedProvider, ask: Ask) -> None:
    provider.says(events(answer({"text": "Hel"}, finish=None)))
    with pytest.raises(CloudFailure, match="cut"):
        ask(NATIVE, stream=True)


def test_google_says_in_the_body_when_to_come_again(provider: ScriptedProvider, ask: Ask) -> None:
    info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "0.02s"}
    spent = {"error": {"code": 429, "message": "Quota.", "status": "RESOURCE_EXHAUSTED", "details": [info]}}
    provider.says(spent, 429)
    provider.says(answer({"text": "ok"}))
    assert ask(NATIVE)["choices"][0]["message"]["content"] == "ok"
    info["retryDelay"] = "3600s"
    provider.says(spent, 429)
    with pytest.raises(CloudFailure) as raised:
        ask(NATIVE)
    assert (raised.value.kind, raised.value.retry_after_s) == ("unreachable", 3600)
    assert raised.value.error.code == "rate_limit_exceeded"


@pytest.mark.parametrize(
    ("status", "word", "code"),
    [
        (401, "UNAUTHENTICATED", "invalid_api_key"),
        (404, "NOT_FOUND", "model_not_found"),
        (400, "INVALID_ARGUMENT", 400),
    ],
)
def test_a_refusal(provider: ScriptedProvider, ask: Ask, status: int, word: str, code: Any) -> None:
    provider.says({"error": {"code": status, "message": "No.", "status": word}}, status)
    with pytest.raises(CloudFailure) as raised:
        ask(NATIVE)
    assert (raised.value.kind, raised.value.error.status, raised.value.error.code) == ("refused", status, code)


def test_no_stream_is_begun_that_it_could_not_continue() -> None:
    with pytest.raises(ConfigurationError, match="cloud_continues"):
        RouterConfig(cloud_url="https://h", cloud_model="m", cloud_provider="gemini", cloud_continues=True)
