"""A cloud on a real socket that returns scripted answers in any API's format, and records the requests."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Ask = Callable[..., Any]
IMAGE = "data:image/png;base64,iVBORw0KGgo="
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
#: Fields of every message of Anthropic's API.
HEAD = {"id": "m1", "type": "message", "role": "assistant", "model": "m"}
#: A conversation with every feature of the chat format.
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "And here?"}, {"type": "image_url", "image_url": {"url": IMAGE}}],
    },
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": '{"sky": "blue"}'},
    {"role": "user", "content": "So?"},
]


@dataclass
class Scripted:
    """One answer. `body`: a JSON value, raw bytes, or the text of an event stream."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Asked:
    """A request that the provider received."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class ScriptedProvider:
    url: str = ""
    answers: deque[Scripted] = field(default_factory=deque)
    asked: list[Asked] = field(default_factory=list)
    # Answer to every GET; None uses the next of `answers`.
    models: Scripted | None = None

    def says(self, body: Any, status: int = 200, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answers.append(Scripted(body, status, named))


@contextmanager
def running_provider() -> Iterator[ScriptedProvider]:
    provider = ScriptedProvider()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def do_GET(self) -> None:
            self.reply(None)

        def reply(self, body: Any) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            provider.asked.append(Asked(self.path, headers, body))
            answer = provider.models if body is None and provider.models else provider.answers.popleft()
            streamed = isinstance(answer.body, str)
            data = answer.body
            if not isinstance(data, bytes):
                data = data.encode() if streamed else json.dumps(data).encode()
            kind = "text/event-stream" if streamed else "application/json"
            self.send_response(answer.status)
            for name, value in {"content-type": kind, "content-length": str(len(data)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_arguments: object) -> None:
            """Keep the test's output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        provider.url = f"http://127.0.0.1:{server.server_port}"
        yield provider
        server.shutdown()


def events(*payloads: dict[str, Any]) -> str:
    """Return the text of an event stream. Events are named after their payload's `type`, if there is one."""
    return "".join(
        (f"event: {payload['type']}\n" if "type" in payload else "") + f"data: {json.dumps(payload)}\n\n"
        for payload in payloads
    )


def anthropic_says(
    cloud: ScriptedProvider, blocks: list[dict[str, Any]], reason: str, *, stream: bool, stopped_by: str | None = None
) -> None:
    """Say a message of Anthropic's API, or stream it with each text in two pieces."""
    usage = {"input_tokens": 9, "output_tokens": 5}
    if not stream:
        cloud.says({**HEAD, "content": blocks, "stop_reason": reason, "stop_sequence": stopped_by, "usage": usage})
        return
    made: list[dict[str, Any]] = [{"type": "message_start", "message": {**HEAD, "content": [], "usage": usage}}]
    for index, block in enumerate(blocks):
        empty = {name: "" for name in ("thinking", "signature", "text") if name in block}
        begun = {name: value for name, value in block.items() if name != "citations"} | empty
        pieces: list[dict[str, Any]] = [
            {"type": f"{name}_delta", name: part} for name in empty for part in (block[name][:1], block[name][1:])
        ]
        if block["type"] == "compaction":
            begun["content"], pieces = None, [{"type": "compaction_delta", "content": block["content"]}]
        if "input" in block:
            begun["input"], pieces = {}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        pieces += [{"type": "citations_delta", "citation": each} for each in block.get("citations", ())]
        made.append({"type": "content_block_start", "index": index, "content_block": begun})
        made += [{"type": "content_block_delta", "index": index, "delta": each} for each in pieces]
        made.append({"type": "content_block_stop", "index": index})
    ended = {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": stopped_by}, "usage": usage}
    cloud.says(events(*made, ended, {"type": "message_stop"}))


def deltas(chunks: list[dict[str, Any]], name: str) -> list[Any]:
    """Return all values of the delta field `name` in `chunks` that are not empty."""
    return [
        choice["delta"][name]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["delta"].get(name) not in (None, "")
    ]
