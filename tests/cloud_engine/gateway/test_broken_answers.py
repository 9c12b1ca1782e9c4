"""Nodes whose answers are broken: another node is asked before the first byte, and else the client gets an error."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import gateway_keys
import httpx
import pytest
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from updraft.cloud_engine.gateway.ledger.opening import open_reader

CHAT, COMPLETIONS, EMBEDDINGS, RERANK = "chat/completions", "completions", "embeddings", "rerank"
RESPONSES, MESSAGES, COUNT = "responses", "messages", "messages/count_tokens"
EVENTS, JSON, HTML = "text/event-stream", "application/json", "text/html"
GOOD: dict[str, Any] = {
    CHAT: {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}]},
    COMPLETIONS: {"choices": [{"index": 0, "text": "Hi", "finish_reason": "stop"}]},
    EMBEDDINGS: {"data": [{"index": 0, "embedding": [0.5]}]},
    RERANK: {"results": [{"index": 0, "relevance_score": 0.5}]},
    RESPONSES: {"id": "r", "output": [], "error": None},
    MESSAGES: {"type": "message", "content": []},
    COUNT: {"input_tokens": 5},
}
BEGIN = b'data: {"choices":[{"index":0,"delta":{"content":"He"},"finish_reason":null}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
CREATED = b'event: response.created\ndata: {"type":"response.created","response":{}}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"He"}\n\n'
COMPLETED = b'event: response.completed\ndata: {"type":"response.completed","response":{}}\n\n'
STARTED = b'event: message_start\ndata: {"type":"message_start","message":{}}\n\n'
STOPPED = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
REASON = b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n'
STREAMS = {CHAT: BEGIN + END, RESPONSES: CREATED + DELTA + COMPLETED, MESSAGES: STARTED + REASON + STOPPED}
FIRST = {CHAT: BEGIN, RESPONSES: CREATED, MESSAGES: STARTED}
CUT = b"<cut>"


@dataclass
class Stub:
    """Answers with what the test sets: status 200, a type, and a body. `CUT` breaks the connection off."""

    models: tuple[str, ...]
    kind: str = JSON
    body: bytes = b""
    asked: int = 0

    def app(self) -> Starlette:
        post = Route("/{rest:path}", self.answer, methods=["POST"])
        return Starlette(routes=[Route("/v1/models", self.list), post])

    async def list(self, _request: Request) -> Response:
        return JSONResponse({"data": [{"id": name, "owned_by": "somebody"} for name in self.models]})

    async def answer(self, request: Request) -> Response:
        path = request.url.path.removeprefix("/v1/")
        self.asked += 1
        if (await request.json())["model"] == "both" and not self.body:
            stream = (await request.json()).get("stream")
            return Response(STREAMS[path], media_type=EVENTS) if stream else JSONResponse(GOOD[path])

        async def pieces() -> AsyncGenerator[bytes]:
            yield self.body.removesuffix(CUT)
            if self.body.endswith(CUT):
                raise ConnectionError("the node dies")

        return StreamingResponse(pieces(), media_type=self.kind)


@dataclass
class GatewaySetup:
    client: httpx.Client
    key: str
    database: Any
    lone: Stub = field(default_factory=lambda: Stub(("alone",)))
    bad: Stub = field(default_factory=lambda: Stub(("both",)))
    good: Stub = field(default_factory=lambda: Stub(("both",)))

    def post(self, path: str, model: str, **more: Any) -> httpx.Response:
        body = {"model": model, "messages": [], "prompt": "a", "input": "a", "query": "a", "documents": ["a"], **more}
        return self.client.post(f"/v1/{path}", json=body, headers={"x-api-key": self.key})

    def last_row(self) -> dict[str, Any]:
        self.client.get("/admin/usage", headers={"authorization": f"Bearer {self.key}"}).raise_for_status()
        with open_reader(self.database).rows() as rows:
            return list(rows)[-1]

    def post_until_asked(self, path: str, **more: Any) -> list[httpx.Response]:
        """Requests that both nodes may answer, until the bad one was asked, and was then asked for a good answer."""
        answers = list[httpx.Response]()
        for body in (self.bad.body, b""):  # errors in a row would put the node out
            self.bad.asked, self.bad.body = 0, body
            while not self.bad.asked:
                answers.append(self.post(path, "both", **more))
        return answers

    def answer_with(self, kind: str, body: bytes) -> None:
        for stub in (self.lone, self.bad):
            stub.kind, stub.body = kind, body


@pytest.fixture(scope="module")
def setup(spawned: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewaySetup]:
    folder = tmp_path_factory.mktemp("broken")
    key = gateway_keys.make_key(folder / "keys", "app", "inference", "usage")
    made = GatewaySetup(httpx.Client(), key, folder / "usage")
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(stub.app())) for stub in (made.lone, made.bad, made.good)]
        nodes = [part for url in urls for part in ("--node", url)]
        command = ["-m", "updraft", "gateway", "--port", "0", "--exit-with-parent", "--keys", str(folder / "keys")]
        gateway = stack.enter_context(spawned(*command, *nodes, "--ledger", str(made.database)))
        made.client = stack.enter_context(httpx.Client(base_url=gateway.url, timeout=60))
        yield made


SHAPES = (b"[]", b"null", b"5", b'"text"', b"{}", b'{"detail":"no"}')
WHOLE = [
    *((path, kind, body) for path in GOOD for kind, body in ((HTML, b"<html>login</html>"), (JSON, b'{"cho'))),
    *((path, JSON, body) for path in GOOD for body in SHAPES),
    *((path, JSON, b'{"error":{"message":"out of cheese","type":"server_error"}}') for path in GOOD),
    (CHAT, JSON, b'{"choices":[]}'),
    (CHAT, JSON, b'{"choices":{}}'),
    (CHAT, JSON, b'{"choices":[null]}'),
    (CHAT, JSON, b'{"choices":[{"message":"Hi"}]}'),
    (CHAT, JSON, b'{"choices":[{"message":{"content":5}}]}'),
    (CHAT, JSON, b'{"choices":[{"text":"Hi"}]}'),
    (CHAT, JSON, b'{"choices":[{"message":{"tool_calls":[1]}}]}'),
    (CHAT, JSON, b'{"choices":[{"message":{"tool_calls":[{"function":"f"}]}}]}'),
    (CHAT, JSON, b'{"choices":[{"message":{"tool_calls":[{"function":{"name":5}}]}}]}'),
    (CHAT, JSON, b'{"choices":[{"message":{"tool_calls":[{"function":{"name":"f","arguments":{}}}]}}]}'),
    (CHAT, JSON, b'{"choices":[{"message":{"tool_calls":[{"function":{"name":"f","arguments":"{\\"a"}}]}}]}'),
    (CHAT, JSON, b'{"choices":[{"message":{"function_call":{"name":"f","arguments":"{"}},"finish_reason":null}]}'),
    (CHAT, JSON, b'{"choices":[{"message":{"content":"\xff"},"finish_reason":"stop"}]}'),
    (CHAT, JSON, b'{"choices":[{"message":{"content":"Hi"},"finish_reason":7}]}'),
    (CHAT, JSON, b'{"choices":[{"message":{"content":"Hi","reasoning_content":5}}]}'),
    (CHAT, JSON, b'{"choices":[{"message":{"content":"Hi"},"index":-1}]}'),
    (CHAT, JSON, b'{"choices":[{"message":{"content":"Hi"}}],"usage":"x"}'),
    (CHAT, JSON, b'{"choices":[{"message":{},"finish_reason":"error"}],"error":{"message":"out of cheese"}}'),
    (COMPLETIONS, JSON, b'{"choices":[{"text":null}]}'),
    (COMPLETIONS, JSON, b'{"choices":[{"message":{"content":"Hi"}}]}'),
    (EMBEDDINGS, JSON, b'{"data":[]}'),
    (EMBEDDINGS, JSON, b'{"data":[5]}'),
    *((EMBEDDINGS, JSON, b'{"data":[{"embedding":%b}]}' % each) for each in (b"null", b'["x"]', b"[NaN]", b"[null]")),
    (RERANK, JSON, b'{"results":[5]}'),
    (RERANK, JSON, b'{"results":null}'),
    (RERANK, JSON, b'{"results":[{"index":0,"relevance_score":"high"}]}'),
    (RESPONSES, JSON, b'{"id":"r","output":"Hi"}'),
    (RESPONSES, JSON, b'{"id":"r","output":null}'),
    (RESPONSES, JSON, b'{"id":"r","choices":[]}'),
    (RESPONSES, JSON, b'{"id":"r","output":[{"type":"message","content":[{"type":"output_text","text":5}]}]}'),
    (MESSAGES, JSON, b'{"type":"message","content":"Hi"}'),
    (MESSAGES, JSON, b'{"type":"message","content":null}'),
    (MESSAGES, JSON, b'{"type":"message","content":[{"type":"text","text":5}]}'),
    (MESSAGES, JSON, b'{"type":"message","content":[],"stop_reason":5}'),
    (MESSAGES, JSON, b'{"type":"error","error":{"type":"api_error","message":"out of cheese"}}'),
    (COUNT, JSON, b'{"input_tokens":"five"}'),
    *((path, JSON, json.dumps(GOOD[path]).encode() + CUT) for path in (CHAT, RESPONSES)),
]


@pytest.mark.parametrize(("path", "kind", "body"), WHOLE)
def test_invalid_whole_answer_is_a_failure(setup: GatewaySetup, path: str, kind: str, body: bytes) -> None:
    setup.answer_with(kind, body)
    for answer in setup.post_until_asked(path):
        assert (answer.status_code, answer.json()) == (200, GOOD[path])
    if body.endswith(CUT):
        return  # which puts the node out
    answer = setup.post(path, "alone")
    assert answer.status_code == 502, answer.text
    error = answer.json()["error"]
    assert error["message"] and ("cheese" in error["message"]) == (b"cheese" in body)
    row = setup.last_row()
    assert (row["status"], row["completion_tokens"], row["cost_usd"]) == (502, 0, None)


EMPTY = {CHAT: b": nothing\n\n", RESPONSES: b": nothing\n\n", MESSAGES: b": nothing\n\n"}
BROKEN = (
    b"data: {\n\n",
    b"data: hello\n\n",
    b"data: []\n\n",
    b"data: 5\n\n",
    b"<html>\n\n<p>login</p></html>\n\n",
    b'data: {"type":"\xff","choices":[]}\n\n',
    b'event: error\ndata: {"type":"error","error":{"message":"out of cheese","type":"api_error"}}\n\n',
)
WRONG = {
    CHAT: (
        b'data: {"choices":{}}\n\n',
        b'data: {"choices":[{"delta":"Hi"}]}\n\n',
        b'data: {"choices":[{"delta":{"content":5}}]}\n\n',
        b'data: {"choices":[{"delta":{},"finish_reason":5}]}\n\n',
        b'data: {"choices":[{"delta":{"tool_calls":[1]}}]}\n\n',
        b'data: {"choices":[{"delta":{"tool_calls":[{"function":"f"}]}}]}\n\n',
        b'data: {"error":{"message":"out of cheese","type":"server_error"}}\n\n',
        b'data: { "error": "out of cheese" }\n\n',
        b'data: {"object":"error","message":"out of cheese"}\n\n',
        b"data: {}\n\n",
        b'data: {"foo":1}\n\n',
        b'data: {"choices":null}\n\n',
        b'data: {"error":null,"usage":null}\n\n',
        b'data: {"choices":[{"index":"0","delta":{"content":"Hi"}}]}\n\n',
        b'data: {"choices":[{"index":-1,"delta":{"content":"Hi"}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"reasoning_content":5}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"function":{"arguments":{}}}]}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}],"usage":"x"}\n\n',
        b'data: {"id":"c","choices":[{"index":0,"delta":{"content":""},"finish_reason":"error"}],'
        b'"error":{"code":502,"message":"out of cheese"}}\n\n',
        b"data: [DONE]\n\n",
    ),
    RESPONSES: (
        b'event: x\ndata: {"type":5}\n\n',
        *(
            b'data: {"type":"response.output_text.delta"%b}\n\n' % held
            for held in (b',"delta":5', b',"delta":null', b',"delta":{}', b"")
        ),
        b'data: {"type":"response.completed","response":{"output":"Hi"}}\n\n',
        b'event: x\ndata: {"no":"type"}\n\n',
        *(
            b'data: {"type":"response.%b"%b}\n\n' % (kind, held)
            for kind in (b"created", b"completed", b"failed")
            for held in (b',"response":null', b',"response":5', b"")
        ),
    ),
    MESSAGES: (
        b'data: {"type":"message_start","message":null}\n\n',
        b'event: x\ndata: {"type":[]}\n\n',
        *(
            b'data: {"type":"content_block_delta","index":0%b}\n\n' % held
            for held in (b',"delta":5', b',"delta":null', b',"delta":"Hi"', b',"delta":{"text":5}', b"")
        ),
        b'data: {"type":"content_block_start","index":0,"content_block":null}\n\n',
        b'data: {"type":"message_delta","delta":{"stop_reason":5}}\n\n',
        STOPPED,
        b"data: {}\n\n",
    ),
}
OPENINGS = [(path, EVENTS, body) for path in FIRST for body in (*BROKEN, *WRONG[path])]
OPENINGS += [
    (MESSAGES, EVENTS, begin + STOPPED)
    for begin in (b"", b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hi"}}\n\n')
]
OPENINGS += [(path, HTML, b"<html>login</html>") for path in FIRST]
OPENINGS += [(path, JSON, json.dumps(GOOD[path]).encode()) for path in FIRST]
OPENINGS += [(path, JSON, b'{"error":{"message":"out of cheese","type":"server_error"}}') for path in FIRST]


@pytest.mark.parametrize(("path", "kind", "body"), OPENINGS)
def test_a_stream_that_begins_broken_goes_elsewhere(setup: GatewaySetup, path: str, kind: str, body: bytes) -> None:
    setup.answer_with(kind, body)
    for answer in setup.post_until_asked(path, stream=True):
        assert (answer.status_code, answer.content) == (200, STREAMS[path])
    answer = setup.post(path, "alone", stream=True)
    assert answer.status_code == 502, answer.text
    assert ("cheese" in answer.json()["error"]["message"]) == (b"cheese" in body)
    assert setup.last_row()["status"] == 502


@pytest.mark.parametrize(
    ("path", "body"),
    # A stream that has begun may end with [DONE] alone.
    [(path, body) for path in FIRST for body in (*BROKEN, *WRONG[path], b"") if body != b"data: [DONE]\n\n"],
)
def test_a_stream_that_breaks_later_ends_in_an_error_event(setup: GatewaySetup, path: str, body: bytes) -> None:
    """An event without an end is nothing, and a stream without one is broken."""
    for ending in (body, body.removesuffix(b"\n\n")) if body else (b"",):
        setup.answer_with(EVENTS, FIRST[path] + ending)
        answer = setup.post(path, "alone", stream=True)
        assert answer.status_code == 200
        events = answer.content.decode().split("\n\n")
        assert events.pop() == ""
        last = json.loads(events[-1].rpartition("data: ")[2])
        assert "error" in (last, last.get("type")) or "error" in last, answer.text
        assert len(events) == 2
        assert setup.last_row()["status"] == 502


CALL = b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"%b"}}]}}]}\n\n'


@pytest.mark.parametrize("arguments", [(b"{",), (b'{\\"a\\": 1', b", "), (b"{}", b"}")])
def test_a_stream_that_ends_within_a_tool_call_is_broken(setup: GatewaySetup, arguments: tuple[bytes, ...]) -> None:
    """Without a finish reason, only whole arguments show that the answer is complete."""
    calls = b"".join(CALL % each for each in arguments)
    setup.answer_with(EVENTS, calls + b"data: [DONE]\n\n")
    answer = setup.post(CHAT, "alone", stream=True)
    assert answer.content.startswith(calls) and '"error"' in answer.text and "finish_reason" not in answer.text
    assert setup.last_row()["status"] == 502
    setup.answer_with(EVENTS, CALL % b"{" + CALL % b"}" + b"data: [DONE]\n\n")
    answer = setup.post(CHAT, "alone", stream=True)
    assert '"finish_reason":"tool_calls"' in answer.text and setup.last_row()["status"] == 200


KEPT = (
    b": keep-alive\n\n",
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n',
    b'data: {"choices":[],"created":0,"id":"","model":"","object":"","prompt_filter_results":[{"prompt_index":0}]}\n\n',
    b'data: {"choices":[{"content_filter_offsets":{"start_offset":1},"finish_reason":null,"index":0}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":null}}],"timings":{"predicted_ms":1.5}}\n\n',
    b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""},'
    b'"logprobs":null,"finish_reason":null}],"prompt_token_ids":null}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"\\ud83d"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"\\ud83d"}}],"x": 1.10}\n\n',
)


@pytest.mark.parametrize("event", KEPT)
def test_events_of_real_servers_go_through_as_they_are(setup: GatewaySetup, event: bytes) -> None:
    setup.answer_with(EVENTS, event + BEGIN + event + END)
    answer = setup.post(CHAT, "alone", stream=True, stream_options={"include_usage": True})
    assert (answer.status_code, answer.content) == (200, event + BEGIN + event + END)


@pytest.mark.parametrize(
    ("rest", "shown"),
    [
        (b"", False),
        (b',"provider":"p","timings":{"predicted_ms":1.5},"citations":[]', False),  # not new, no answer, empty
        (b',"provider":"p","citations":["https://a"],"search_results":[{"score": 1.10}]', True),
    ],
)
def test_unrequested_usage_is_hidden_and_the_rest_of_its_event_stays(
    setup: GatewaySetup, rest: bytes, shown: bool
) -> None:
    first = BEGIN.replace(b'"choices"', b'"provider":"p","choices"', 1)
    last = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}%b}\n\n' % rest
    setup.answer_with(EVENTS, first + last + END)
    answer = setup.post(CHAT, "alone", stream=True)
    expected = b'data: {"id":"c","choices":[]%b}\n\n' % rest if shown else b""
    assert (answer.status_code, answer.content) == (200, first + expected + END)


@pytest.mark.parametrize(("path", "late"), [(RESPONSES, DELTA), (RESPONSES, BROKEN[0]), (MESSAGES, STARTED)])
def test_events_after_the_end_are_dropped(setup: GatewaySetup, path: str, late: bytes) -> None:
    setup.answer_with(EVENTS, STREAMS[path] + late + b": bye\n\ndata: [DONE]\n\n")
    answer = setup.post(path, "alone", stream=True)
    assert (answer.status_code, answer.content) == (200, STREAMS[path] + b": bye\n\ndata: [DONE]\n\n")
    assert setup.last_row()["status"] == 200


ODD = [
    (CHAT, b'{"choices":[{"message":{"content":null,"tool_calls":[{"function":{"name":"f"}}]},"finish_reason":"a"}]}'),
    (CHAT, b'{"choices":[{"message":{"reasoning_content":null,"refusal":null},"finish_reason":"stop"}],"usage":null}'),
    (CHAT, b'{"choices":[{"message":{"content":[{"type":"text"}]},"finish_reason":"stop"}],"error":null}'),
    (COMPLETIONS, b'{"choices":[{"text":"","logprobs":{},"finish_reason":"length"}],"usage":{"prompt_tokens":1}}'),
    (EMBEDDINGS, b'{"data":[{"embedding":"AAAA"},{"embedding":[1, -2.5e-3]},{"embedding":[[1],[2]]}]}'),
    (RERANK, b'{"data":[{"index":0,"score":1,"document":null}]}'),
    (RESPONSES, b'{"output":[{"type":"reasoning","content":null},{"type":"function_call","arguments":"{}"}]}'),
    (RESPONSES, b'{"output":[{"type":"message","content":[{"type":"output_text","text":"Hi"}]}],"usage":null}'),
    (RESPONSES, b'{"status":"failed","error":{"code":"server_error","message":"no"},"output":[]}'),
    (MESSAGES, b'{"content":[{"type":"tool_use","name":"f","input":{}},{"type":"thinking","thinking":""}],"usage":{}}'),
    (MESSAGES, b'{"content":[{"type":"web_search_tool_result","content":{"type":"e"}}],"stop_reason":null}'),
]


@pytest.mark.parametrize(("path", "body"), ODD)
def test_whole_answers_of_real_servers_go_through_as_they_are(setup: GatewaySetup, path: str, body: bytes) -> None:
    setup.answer_with(JSON, body)
    answer = setup.post(path, "alone")
    assert (answer.status_code, answer.content) == (200, body)


def test_a_whole_answer_with_half_an_emoji_keeps_its_numbers(setup: GatewaySetup) -> None:
    body = b'{"choices": [{"message": {"content": "\\ud83d"}, "finish_reason": "stop"}], "x": 1.10, "y": 1E2}'
    setup.answer_with(JSON, body)
    answer = setup.post(CHAT, "alone")
    assert (answer.status_code, answer.content) == (200, body)


def test_a_stream_without_its_last_line_gets_no_usage_that_nobody_counted(setup: GatewaySetup) -> None:
    setup.answer_with(EVENTS, (BEGIN + END).removesuffix(b"\n"))
    answer = setup.post(CHAT, "alone", stream=True, stream_options={"include_usage": True})
    assert (answer.status_code, answer.content) == (200, BEGIN + END)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize(
    ("path", "event"),
    [
        (CHAT, 'data: {"choices":[{"index":0,"delta":{"content":"NaN"},"logprobs":{"content":[{"logprob":%s}]}}]}'),
        (RESPONSES, 'event: x\ndata: {"type":"x","logprobs":[{"logprob":%s}],"delta":"NaN"}'),
        (MESSAGES, 'event: x\ndata: {"type":"x","score":%s,"delta":"NaN"}'),
    ],
)
def test_numbers_that_json_has_not_become_null(setup: GatewaySetup, path: str, event: str, number: str) -> None:
    begun = FIRST[path] + f"{event % number}\n\n".encode()
    setup.answer_with(EVENTS, begun + STREAMS[path].removeprefix(FIRST[path]))
    answer = setup.post(path, "alone", stream=True)
    expected = FIRST[path] + f"{event % 'null'}\n\n".encode() + STREAMS[path].removeprefix(FIRST[path])
    assert (answer.status_code, answer.content) == (200, expected)


@pytest.mark.parametrize("path", [EMBEDDINGS, RERANK])
def test_endpoints_without_streams_answer_whole(setup: GatewaySetup, path: str) -> None:
    setup.answer_with(JSON, json.dumps(GOOD[path]).encode())
    for _ in range(3):
        answer = setup.post(path, "alone", stream=True)
        assert (answer.status_code, answer.json()) == (200, GOOD[path])
