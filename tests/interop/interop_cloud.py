"""A cloud that answers as an obedient model would: it calls tools, writes files, fills schemas and greets."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "scripted"
TEXT = "Hello there, friend."
WRITTEN = "The file is written."
# A coding agent's task, and its names for the path of a file.
TASK = re.compile(r"Write the file (/\S+) with the text hello")
PATHS = ("filePath", "file_path", "path")
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


@contextmanager
def scripted_cloud() -> Iterator[str]:
    """Its URL, while it runs."""
    routes = [
        Route("/v1/chat/completions", _chat, methods=["POST"]),
        Route("/v1/embeddings", _embed, methods=["POST"]),
        Route("/v1/models", _models),
        Route("/health", _models),
    ]
    with serving(Starlette(routes=routes)) as url:
        yield url


async def _models(_: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "scripted"}]})


async def _embed(request: Request) -> Response:
    body = await request.json()
    inputs = body["input"] if isinstance(body["input"], list) else [body["input"]]
    vectors = [[float(len(str(text))), 1.0] for text in inputs]
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    return JSONResponse({"object": "list", "model": MODEL, "data": data, "usage": {**USAGE, "completion_tokens": 0}})


async def _chat(request: Request) -> Response:
    body = await request.json()
    message, reason = _answer(body)
    head = {"id": "chatcmpl-1", "created": 1, "model": MODEL, "system_fingerprint": "fp_1"}
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": USAGE})

    def events() -> Iterator[str]:
        for delta, ended in _deltas(message, reason):
            choice = {"index": 0, "delta": delta, "finish_reason": ended}
            yield _event({**head, "object": "chat.completion.chunk", "choices": [choice]})
        if (body.get("stream_options") or {}).get("include_usage"):
            yield _event({**head, "object": "chat.completion.chunk", "choices": [], "usage": USAGE})
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def _deltas(message: dict[str, Any], reason: str) -> Iterator[tuple[dict[str, Any], str | None]]:
    yield {"role": "assistant", "content": ""}, None
    for piece in re.findall(r"\S+\s*", message.get("content") or ""):
        yield {"content": piece}, None
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        yield {"tool_calls": [{**call, "index": index, "function": {**function, "arguments": ""}}]}, None
        for piece in re.findall(r"(?s).{1,7}", function["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}, None
    yield {}, reason


def _answer(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    said = _text(body["messages"][-1])
    if task := next((match for match in map(TASK.search, map(_text, body["messages"])) if match), None):
        return _written(task.group(1), body)
    if functions := _called(body):
        return _calls([(each["name"], _example(each.get("parameters"), said)) for each in functions])
    form = body.get("response_format") or {"type": "text"}
    content = TEXT
    if form["type"] == "json_schema":
        content = json.dumps(_example(form["json_schema"]["schema"], said))
    elif form["type"] == "json_object":
        content = json.dumps(dict.fromkeys(re.findall(r"'(\w+)'", said), "hello"))
    return {"role": "assistant", "content": content}, "stop"


def _calls(calls: list[tuple[str, Any]]) -> tuple[dict[str, Any], str]:
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in calls]
    entries = [{"id": f"call_{i}", "type": "function", "function": each} for i, each in enumerate(functions)]
    return {"role": "assistant", "content": None, "tool_calls": entries}, "tool_calls"


def _written(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The answer of a coding agent's model: write the file with a tool, or as text without tools, then say so."""
    functions = [tool["function"] for tool in body.get("tools") or ()]
    if body["messages"][-1]["role"] == "tool":
        return {"role": "assistant", "content": WRITTEN}, "stop"
    if not functions:
        return {"role": "assistant", "content": f"{path.rpartition('/')[2]}\n```\nhello\n```\n"}, "stop"
    parameters = {each["name"]: each["parameters"]["properties"] for each in functions}
    for name, properties in parameters.items():
        if "content" in properties and (key := next((k for k in PATHS if k in properties), None)):
            return _calls([(name, {key: path, "content": "hello\n"})])
    name = next(name for name, properties in parameters.items() if "cmd" in properties)
    return _calls([(name, {"cmd": f"echo hello > {shlex.quote(path)}"})])


def _called(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The functions to call: the named one, all that the text names (two for "both"), or the first."""
    choice = body.get("tool_choice") or "auto"
    functions = [tool["function"] for tool in body.get("tools") or ()]
    if isinstance(choice, dict):
        return [each for each in functions if each["name"] == choice["function"]["name"]]
    if not functions or choice == "none" or (choice == "auto" and body["messages"][-1]["role"] == "tool"):
        return []
    return functions if "both" in _text(body["messages"][-1]) else functions[:1]


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


def _example(schema: dict[str, Any] | None, said: str, defs: dict[str, Any] | None = None) -> Any:
    """A value that fits: strings are what is quoted in the text, numbers are 3."""
    schema = schema or {"type": "object"}
    defs = schema.get("$defs", defs or {})
    if "$ref" in schema:
        return _example(defs[schema["$ref"].rpartition("/")[2]], said, defs)
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in schema:
            return _example(schema[choice][0], said, defs)
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if kind == "object":
        return {name: _example(each, said, defs) for name, each in schema.get("properties", {}).items()}
    if kind == "array":
        return [_example(schema.get("items"), said, defs)]
    quoted = re.search(r"'([^']+)'", said)
    values = {"integer": 3, "number": 3.0, "boolean": True, "null": None}
    return values.get(kind, quoted.group(1) if quoted else "hello")
