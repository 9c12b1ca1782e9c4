"""Responses, Messages and audio go through the gateway unchanged: metered, and never continued at another node."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import anthropic
import gateway_keys
import httpx
import openai
import pytest
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from updraft.cloud_engine.gateway.ledger.opening import open_reader

TEXT = json.dumps('a "type": "message_stop" b, "usage": {"output_tokens": 999}')
RESPONSES = [
    b'event: response.created\ndata: {"type":"response.created","response":{"usage":null},"sequence_number":0}\n\n',
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":%b,"sequence_number":1}\n\n'
    % TEXT.encode(),
    b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":{"input_tokens":7,'
    b'"input_tokens_details":{"cached_tokens":2},"output_tokens":3}},"sequence_number":2}\n\n',
]
MESSAGES = [
    b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":5,"output_tokens":1,'
    b'"cache_read_input_tokens":2,"cache_creation_input_tokens":1}}}\n\n',
    b'event: ping\ndata: {"type": "ping"}\n\n',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":%b}}\n\n' % TEXT.encode(),
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"b"}}\n\n',
    b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":9}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
]
BODIES = {
    "/v1/responses": {"model": "big", "input": "hello"},
    "/v1/messages": {"model": "big", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]},
}


@dataclass
class Foreign:
    """Answers with what the test sets, and keeps what it was asked."""

    answer: Callable[[], Response] = field(default=lambda: JSONResponse({}))
    asked: list[tuple[str, str, bytes]] = field(default_factory=list[tuple[str, str, bytes]])

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "big", "object": "model", "owned_by": "somebody"}]})

    async def take(self, request: Request) -> Response:
        self.asked.append((request.url.path, request.headers["content-type"], await request.body()))
        return self.answer()

    @property
    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/models", self.models), Route("/{rest:path}", self.take, methods=["POST"])])


@dataclass
class GatewaySetup:
    nodes: tuple[Foreign, Foreign]
    url: str
    key: str
    database: Any

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(
            f"{self.url}{path}", json=BODIES.get(path, {"model": "big"}) | body, headers={"x-api-key": self.key}
        )

    def last_row(self) -> dict[str, Any]:
        httpx.get(f"{self.url}/admin/usage", headers={"authorization": f"Bearer {self.key}"}).raise_for_status()
        with open_reader(self.database).rows() as rows:
            return list(rows)[-1]


@pytest.fixture
def setup(spawn: Any, tmp_path: Any) -> Iterator[GatewaySetup]:
    nodes = Foreign(), Foreign()
    key = gateway_keys.make_key(tmp_path / "keys", "app", "inference", "usage")
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(node.app)) for node in nodes]
        given = [part for url in urls for part in ("--node", url)]
        command = ["-m", "updraft", "gateway", "--port", "0", "--exit-with-parent", "--keys", str(tmp_path / "keys")]
        gateway = spawn(*command, *given, "--ledger", str(tmp_path / "usage"))
        yield GatewaySetup(nodes, gateway.url, key, tmp_path / "usage")


def stream(events: list[bytes], *, breaks: bool = False) -> Callable[[], Response]:
    async def body() -> Any:
        for event in events:
            half = len(event) // 2
            yield event[:half]
            yield event[half:]
        if breaks:
            raise ConnectionError("the node dies")

    return lambda: StreamingResponse(body(), media_type="text/event-stream")


ESTIMATE = 45  # tokens of the prompt, by its bytes: no node has counted it


def counted(row: dict[str, Any]) -> tuple[int, int, int, int]:
    return row["status"], row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]


@pytest.mark.parametrize(
    ("path", "events", "count"),
    [("/v1/responses", RESPONSES, (200, 7, 2, 3)), ("/v1/messages", MESSAGES, (200, 8, 2, 9))],
)
def test_a_stream_passes_unchanged_and_is_metered(
    setup: GatewaySetup, path: str, events: list[bytes], count: tuple[int, ...]
) -> None:
    for node in setup.nodes:
        node.answer = stream(events)
    answer = setup.post(path, stream=True)
    assert answer.content == b"".join(events)
    ((asked, _, body),) = setup.nodes[0].asked + setup.nodes[1].asked
    assert (asked, json.loads(body)) == (path, BODIES[path] | {"stream": True})
    assert counted(setup.last_row()) == count


@pytest.mark.parametrize(
    ("path", "events", "count"),
    [
        ("/v1/responses", RESPONSES[:2], (502, ESTIMATE, 0, len(json.loads(TEXT)) // 4)),
        ("/v1/messages", MESSAGES[:4], (502, 8, 2, (len(json.loads(TEXT)) + 1) // 4)),
    ],
)
@pytest.mark.parametrize("breaks", [True, False])
def test_a_stream_that_breaks_off_ends_in_an_error_event_of_its_kind(
    setup: GatewaySetup, path: str, events: list[bytes], count: tuple[int, ...], breaks: bool
) -> None:
    for node in setup.nodes:
        node.answer = stream(events, breaks=breaks)
    content = setup.post(path, stream=True).content
    assert content.startswith(b"".join(events) + b"event: error\ndata: ")
    error = json.loads(content.rpartition(b"data: ")[2])
    assert error["type"] == "error"
    if path == "/v1/messages":
        assert error["error"]["type"] == "api_error" and error["error"]["message"]
    else:
        assert error["sequence_number"] == 2 and error["message"]
    assert len(setup.nodes[0].asked + setup.nodes[1].asked) == 1
    assert counted(setup.last_row()) == count


def test_whole_answers_and_what_a_prompt_would_cost(setup: GatewaySetup) -> None:
    read = {"input_tokens": 5, "cache_read_input_tokens": 2, "output_tokens": 3}
    for path, whole, count in (
        ("/v1/responses", {"output": [], "usage": {"input_tokens": 7, "output_tokens": 3}}, (200, 7, 0, 3)),
        ("/v1/messages", {"content": [], "usage": read}, (200, 7, 2, 3)),
    ):
        for node in setup.nodes:
            node.answer = lambda whole=whole: JSONResponse(whole)
        assert setup.post(path).json() == whole
        assert counted(setup.last_row()) == count
    for node in setup.nodes:
        node.answer = lambda: JSONResponse({"input_tokens": 77})
    for path in ("/v1/messages/count_tokens", "/v1/responses/input_tokens"):
        assert setup.post(path).json() == {"input_tokens": 77}
        assert counted(setup.last_row()) == (200, 0, 0, 0)


@pytest.mark.parametrize("field", ["background", "Background"])
def test_responses_in_the_background_are_refused(setup: GatewaySetup, field: str) -> None:
    """The node would answer at once, without usage, and write the answer later, at nobody's cost."""
    refused = setup.post("/v1/responses", **{field: True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert not any(node.asked for node in setup.nodes)


def test_texts_for_booleans_reach_nodes_as_booleans(setup: GatewaySetup) -> None:
    """A node may read the text "false" as true, and would then stream. Other bytes stay unchanged."""
    whole = {"id": "whole", "output": [], "content": []}
    setup.nodes[0].answer = setup.nodes[1].answer = lambda: JSONResponse(whole)
    body = b'{"model":"big","messages":[{"content":1.10}],"stream":"false","background":"False"}'
    headers = {"x-api-key": setup.key, "content-type": "application/json"}
    for path in ("/v1/responses", "/v1/messages"):
        answer = httpx.post(f"{setup.url}{path}", content=body, headers=headers)
        assert answer.json() == whole
    for _, _, asked in setup.nodes[0].asked + setup.nodes[1].asked:
        assert asked == b'{"model":"big","messages":[{"content":1.10}],"stream":false,"background":false}'
    refused = setup.post("/v1/responses", stream="no")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")


def test_the_node_that_has_the_route_answers(setup: GatewaySetup) -> None:
    without, having = setup.nodes
    without.answer = lambda: JSONResponse({"detail": "Not Found"}, 404)
    here = {"id": "here", "output": []}
    having.answer = lambda: JSONResponse(here)
    assert [setup.post("/v1/responses").json() for _ in range(4)] == [here] * 4
    having.answer = without.answer
    refused = setup.post("/v1/messages")
    assert refused.status_code == 404
    assert refused.json()["type"] == "error" and refused.json()["error"]["message"] == "Not Found"


def test_our_own_nodes_have_responses_and_messages(spawn: Any, fake_node: Any, tmp_path: Any) -> None:
    command = ["gateway", "--port", "0", "--no-auth", "--exit-with-parent", "--node", fake_node.url]
    gateway = spawn("-m", "updraft", *command, "--ledger", str(tmp_path / "db"))
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(model="echo", input="hello", max_output_tokens=4)
        events = list(client.responses.create(model="echo", input="hello", max_output_tokens=4, stream=True))
        count = client.responses.input_tokens.count(model="echo", input="hello").input_tokens
        for kept in (client.files.list, client.chat.completions.list, lambda: client.responses.retrieve("resp_1")):
            with pytest.raises(openai.APIStatusError, match="updraft serve"):
                kept()
    assert whole.output_text and whole.usage is not None and whole.usage.input_tokens == count
    assert whole.output_text == events[-1].response.output_text  # pyright: ignore[reportAttributeAccessIssue]
    asked: Any = {"model": "echo", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as messages:
        said = messages.messages.create(**asked)
        with messages.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        assert said.content[0].to_dict() == streamed.content[0].to_dict() == {"type": "text", "text": whole.output_text}
        with pytest.raises(anthropic.BadRequestError) as wrong:
            messages.messages.create(**{**asked, "max_tokens": 0})
        assert wrong.value.type == "invalid_request_error"
    refused = httpx.post(f"{gateway.url}/v1/audio/speech", json={"model": "echo"})
    assert refused.status_code == 404
    assert refused.json()["error"].keys() >= {"message", "type", "param", "code"}


def test_audio_in_both_directions(setup: GatewaySetup) -> None:
    sound = bytes(range(256)) * 8
    for node in setup.nodes:
        node.answer = lambda: Response(sound, media_type="audio/mpeg")
    spoken = setup.post("/v1/audio/speech", input="hi", voice="a")
    assert (spoken.content, spoken.headers["content-type"]) == (sound, "audio/mpeg")
    for node in setup.nodes:
        node.asked.clear()
        node.answer = lambda: JSONResponse({"text": "hi", "usage": {"input_tokens": 14, "output_tokens": 2}})
    request = httpx.Request(
        "POST",
        f"{setup.url}/v1/audio/transcriptions",
        data={"model": "big"},
        files={"file": ("model.wav", sound)},
        headers={"authorization": f"Bearer {setup.key}"},
    )
    sent = request.read()
    with httpx.Client() as client:
        assert client.send(request).json()["text"] == "hi"
    ((path, kind, body),) = setup.nodes[0].asked + setup.nodes[1].asked
    assert (path, kind, body) == ("/v1/audio/transcriptions", request.headers["content-type"], sent)
    assert counted(setup.last_row()) == (200, 14, 0, 2)
