"""Requests to every endpoint that calls a cloud, with text in every field that takes text, for privacy tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from updraft.protocol.http.wire import WireRequest
from updraft.router.server.endpoints import ROUTES

Json = Any
Place = tuple[str | int, ...]

_SCHEMA = {"type": "object", "title": "Answer", "properties": {"city": {"type": "string", "enum": ["Bern"]}}}
_FUNCTION = {"name": "look", "description": "Looks it up.", "parameters": _SCHEMA}
_TOOL = {"type": "function", "function": _FUNCTION}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Bern"}'}}
_OLLAMA = {"model": "auto", "stream": False, "format": _SCHEMA, "options": {"stop": ["END"]}, "keep_alive": "5m"}

#: Request bodies by path. Without a privacy rule, the router sends each of them to the cloud.
BODIES: Mapping[str, dict[str, Json]] = {
    "/v1/chat/completions": {
        "model": "auto",
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "ann"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "found"},
            {"role": "user", "content": "go on", "annotations": [{"note": "of a friend"}]},
        ],
        "tools": [_TOOL],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}},
        "prediction": {"type": "content", "content": "perhaps"},
        "stop": ["END"],
        "user": "u-1",
        "metadata": {"run": "one"},
        "reasoning_effort": "low",
        "of_another_server": {"deep": ["words", {"deeper": "words"}]},
    },
    "/v1/completions": {"model": "auto", "prompt": ["hello"], "stop": "END", "user": "u-1", "suffix": "bye"},
    "/v1/embeddings": {"model": "auto", "input": ["hello", "you"], "user": "u-1", "input_type": "query"},
    "/v1/moderations": {"model": "m", "input": [{"type": "text", "text": "hello"}]},
    "/v1/rerank": {"model": "m", "query": "hello", "documents": ["one", {"text": "two"}]},
    "/v1/audio/speech": {"model": "m", "input": "hello", "voice": "alloy", "instructions": "Softly."},
    "/v1/images/generations": {"model": "m", "prompt": "a house", "user": "u-1"},
    "/v1/responses": {
        "model": "auto",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"city": "Bern"}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "found"},
            {"role": "assistant", "content": "So it is."},
            {"role": "user", "content": "go on"},
        ],
        "tools": [{"type": "function", **_FUNCTION}],
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": _SCHEMA}, "verbosity": "low"},
        "metadata": {"run": "one"},
        "user": "u-1",
        "safety_identifier": "s-1",
        "prompt_cache_key": "p-1",
    },
    "/v1/responses/compact": {
        "model": "auto",
        "instructions": "Be brief.",
        "input": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "So it is."}],
        "prompt_cache_key": "p-1",
    },
    "/v1/messages": {
        "model": "auto",
        "max_tokens": 20,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "hello"},
                    {
                        "type": "document",
                        "source": {"type": "text", "media_type": "text/plain", "data": "of old"},
                        "title": "Annals",
                        "context": "a draft",
                    },
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"city": "Bern"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "found"}]},
        ],
        "tools": [{"name": "look", "description": "Looks it up.", "input_schema": _SCHEMA}],
        "stop_sequences": ["END"],
        "metadata": {"user_id": "u-1"},
    },
    "/api/chat": {
        **_OLLAMA,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello"},
            {
                "role": "assistant",
                "content": "",
                "thinking": "hm",
                "tool_calls": [{"function": {"name": "look", "arguments": {"city": "Bern"}}}],
            },
            {"role": "tool", "tool_name": "look", "content": "found"},
        ],
        "tools": [_TOOL],
    },
    "/api/generate": {**_OLLAMA, "prompt": "hello", "system": "Be brief."},
    "/api/embed": {"model": "auto", "input": ["hello"]},
    "/api/embeddings": {"model": "auto", "prompt": "hello"},
}
_TURN = [{"role": "user", "content": "TEXT"}]
#: Minimal request bodies by path. Tests replace `TEXT` by their own text.
QUESTIONS: Mapping[str, dict[str, Json]] = {
    "/v1/chat/completions": {"messages": _TURN, "max_tokens": 4},
    "/v1/completions": {"prompt": "TEXT", "max_tokens": 4},
    "/v1/embeddings": {"input": "TEXT"},
    "/v1/moderations": {"input": "TEXT"},
    "/v1/rerank": {"query": "TEXT", "documents": ["one"]},
    "/v1/audio/speech": {"input": "TEXT", "voice": "alloy"},
    "/v1/images/generations": {"prompt": "TEXT"},
    "/v1/responses": {"input": "TEXT", "max_output_tokens": 16},
    "/v1/responses/compact": {"input": "TEXT"},
    "/v1/messages": {"messages": _TURN, "max_tokens": 4},
    "/api/chat": {"messages": _TURN, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "TEXT", "options": {"num_predict": 4}},
    "/api/embed": {"input": "TEXT"},
    "/api/embeddings": {"prompt": "TEXT"},
}
#: Endpoints that take forms, whose content privacy rules cannot inspect.
FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
#: Routes that only store data, count tokens or fetch models, without a cloud. Other tests cover batches.
OF_THIS_MACHINE = frozenset(
    (
        *("/tokenize", "/detokenize", "/v1/chat/completions/input_tokens", "/v1/messages/count_tokens"),
        *("/v1/chat/completions/{completion}", "/v1/responses/{response}/cancel", "/v1/files", "/v1/batches"),
        *("/v1/batches/{batch}/cancel", "/api/show", "/updraft/requests/{id}/feedback", "/updraft/trace"),
        *("/updraft/models/pull", "/api/pull", "/updraft/models/memory", "/updraft/markdown", "/updraft/route"),
        *("/v1/responses/input_tokens", "/updraft/target", "/updraft/tasks/{task}", "/v1/messages/batches"),
        *("/v1/messages/batches/{batch}/cancel", "/v1/conversations", "/v1/conversations/{conversation}"),
        "/v1/conversations/{conversation}/items",
    )
)


def unknown_routes() -> set[str]:
    """Return the POST routes that are missing from the constants above."""
    return {route.path for route in ROUTES if route.method == "POST"} - BODIES.keys() - {*FORMS} - OF_THIS_MACHINE


def post(path: str, body: Json, headers: Mapping[str, str] | None = None, query: str = "") -> WireRequest:
    return WireRequest("POST", path, headers or {}, json.dumps(body).encode(), query=query)


def question(path: str, text: str, **more: Json) -> WireRequest:
    body = json.dumps({"model": "auto", **QUESTIONS[path], **more}).replace("TEXT", text)
    return WireRequest("POST", path, {}, body.encode())


def form(path: str, text: str) -> WireRequest:
    parts = {'"model"': "m", '"prompt"': text, '"file"; filename="a.wav"': "RIFF"}
    lines = "".join(
        f"--b\r\ncontent-disposition: form-data; name={name}\r\n\r\n{part}\r\n" for name, part in parts.items()
    )
    return WireRequest("POST", path, {"content-type": "multipart/form-data; boundary=b"}, f"{lines}--b--\r\n".encode())


def places(value: Json, at: Place = ()) -> Iterator[Place]:
    """Yield the path (keys and indices) of each string in `value`."""
    if isinstance(value, str):
        yield at
    entries: list[tuple[Any, Json]] = []
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list):
        entries = list(enumerate(value))
    for name, entry in entries:
        yield from places(entry, (*at, name))


def with_text(value: Json, place: Place, text: str, *, as_name: bool = False) -> Json:
    """Return `value` with `text` at `place`. `as_name`: rename the field at `place` to `text` instead."""
    name, *rest = place
    changed = text if not rest else with_text(value[name], tuple(rest), text, as_name=as_name)
    if isinstance(value, list):
        return [changed if index == name else entry for index, entry in enumerate(value)]
    if as_name and not rest:
        return {text if field == name else field: entry for field, entry in value.items()}
    return {**value, name: changed}
