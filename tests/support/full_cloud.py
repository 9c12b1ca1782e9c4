"""A cloud that answers with every optional field of OpenAI's schema, and records the requests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
_TOKEN = {"token": "Hi", "logprob": -0.1, "bytes": [72, 105], "top_logprobs": []}
_CITATION = {"start_index": 0, "end_index": 2, "title": "t", "url": "https://example.org"}
_DETAILS = {
    "prompt_tokens_details": {"cached_tokens": 1, "audio_tokens": 0},
    "completion_tokens_details": {
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
        "audio_tokens": 0,
        "reasoning_tokens": 2,
    },
}
_SHARED = {
    "id": "chatcmpl-1",
    "created": 1,
    "model": "big",
    "service_tier": "default",
    "system_fingerprint": "fp_1",
    "provider_specific_fields": {"region": "eu"},
}
_USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, **_DETAILS}


@dataclass
class FullCloud:
    """A cloud that records `bodies`, `headers` and `queries` of its requests, in their order."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.queries.append(request.url.query)
        message, reason = _message(body)
        if body.get("stream"):
            return StreamingResponse(_events(message, reason), media_type="text/event-stream")
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": _logprobs()}
        return JSONResponse({**_SHARED, "object": "chat.completion", "choices": [choice], "usage": _USAGE})


async def _models(_request: Request) -> Response:
    card = {"id": "big", "object": "model", "created": 5, "owned_by": "somebody", "max_model_len": 99}
    return JSONResponse({"object": "list", "data": [card]})


def _logprobs() -> dict[str, Any]:
    return {"content": [_TOKEN], "refusal": None}


def _message(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a message and its finish reason: a tool call, JSON or text.

    Requests with tools get a tool call, unless the last message is a tool's result. Others get JSON if they ask for a
    format.
    """
    rest = {"role": "assistant", "refusal": None, "audio": None, "function_call": None, "reasoning_content": "Hm."}
    if body.get("tools") and body["messages"][-1]["role"] != "tool":
        return {**rest, "content": None, "tool_calls": [CALL], "annotations": []}, "tool_calls"
    content = '{"city": "Oslo"}' if body.get("response_format") else "Hi"
    annotations = [{"type": "url_citation", "url_citation": _CITATION}]
    return {**rest, "content": content, "tool_calls": [], "annotations": annotations}, "stop"


async def _events(message: dict[str, Any], reason: str) -> AsyncIterator[bytes]:
    """Yield a stream in which the last text comes with the finish reason, as some servers send it."""
    calls = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls") or ())]
    first = {"role": "assistant", "content": "", "refusal": None, "reasoning_content": "Hm."}
    last = {"tool_calls": calls} if calls else {"content": message["content"]}
    for delta, finish in ((first, None), (last, reason)):
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": _logprobs()}
        yield _event({"choices": [choice], "usage": None, "obfuscation": "x"})
    yield _event({"choices": [], "usage": _USAGE})
    yield b"data: [DONE]\n\n"


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({**_SHARED, "object": "chat.completion.chunk", **fields}).encode() + b"\n\n"


@contextmanager
def running_full_cloud() -> Iterator[FullCloud]:
    cloud = FullCloud()
    routes = [Route("/v1/chat/completions", cloud.chat, methods=["POST"]), Route("/v1/models", _models)]
    with serving(Starlette(routes=routes)) as cloud.url:
        yield cloud
