"""Clouds that leave out parts of OpenAI's form, or spell them differently: each endpoint hands on a regular answer."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from router_fakes import ScriptedGates, ScriptedLocal, tiers
from scripted_provider import ScriptedProvider, running_provider
from serving import serving
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app

HEAD = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
#: The request of each endpoint.
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "tools": [FUNCTION]},
    "/v1/responses": {"input": "hello", "tools": [{"type": "function", "name": "read", "parameters": SCHEMA}]},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9, "tools": [{"name": "read", "input_schema": SCHEMA}]},
    "/api/chat": {"messages": HELLO, "tools": [FUNCTION]},
}
EVERYWHERE = pytest.mark.parametrize("path", ASKED)
DEEP = '{"a":' * 20_000 + "1" + "}" * 20_000
BOTH = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def cloud() -> Iterator[ScriptedProvider]:
    with running_provider() as provider:
        yield provider


@pytest.fixture
def http(cloud: ScriptedProvider) -> Iterator[httpx.Client]:
    cloud.answers.clear()
    config = RouterConfig(local="pocket", cloud_url=cloud.url, cloud_model="m")
    app = daemon_app(Router(config, tiers(ScriptedLocal(), config, ScriptedGates())))
    with serving(app, lifespan=True) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def call(path: Any, **more: Any) -> dict[str, Any]:
    return {"id": f"id-{path}", "type": "function", "function": {"name": "read", "arguments": path}, **more}


def whole(message: dict[str, Any], finish: str | None, **more: Any) -> bytes:
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return json.dumps({**HEAD, "choices": [choice], "usage": USAGE, **more}).encode()


def events(*deltas: dict[str, Any], finish: str | None = "stop", done: bool = True) -> str:
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    if finish:
        choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    lines = [json.dumps({**HEAD, "object": "chat.completion.chunk", "choices": [choice]}) for choice in choices]
    return "".join(f"data: {line}\n\n" for line in [*lines, *(["[DONE]"] if done else [])])


def ask(http: httpx.Client, path: str, *, stream: bool, **more: Any) -> tuple[str, list[Any], Any]:
    """Return text, arguments of calls and finish reason of an answer, by the rules of the endpoint."""
    reply = http.post(path, json={"model": "cloud", "stream": stream, **ASKED[path], **more})
    assert reply.status_code == 200, reply.text
    if not stream:
        read = {"/v1/responses": of_response, "/v1/messages": of_message, "/api/chat": of_ollama}.get(path, of_chat)
        return read(reply.json())
    if path == "/api/chat":
        lines = [json.loads(line) for line in reply.text.splitlines()]
        texts, calls = "".join(line["message"]["content"] for line in lines), list[Any]()
        for line in lines:
            calls += [each["function"]["arguments"] for each in line["message"].get("tool_calls", ())]
        return texts, calls, lines[-1]["done_reason"]
    data = [json.loads(line[5:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert "error" not in data[-1], data[-1]
    if path == "/v1/responses":
        return of_response(data[-1]["response"])
    if path == "/v1/messages":
        deltas = [event["delta"] for event in data if event["type"] == "content_block_delta"]
        starts = [event for event in data if event["type"] == "content_block_start"]
        tools = [event["index"] for event in starts if event["content_block"]["type"] == "tool_use"]
        arguments = dict.fromkeys(tools, "")
        for event in data:
            if event["type"] == "content_block_delta" and event["index"] in arguments:
                arguments[event["index"]] += event["delta"]["partial_json"]
        reason = next(event["delta"]["stop_reason"] for event in data if event["type"] == "message_delta")
        text = "".join(delta.get("text", "") for delta in deltas)
        return text, [json.loads(each) for each in arguments.values()], reason
    text, calls, reason = "", dict[int, str](), None
    for choice in (choice for chunk in data for choice in chunk["choices"]):
        text += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls") or ():
            calls[part["index"]] = calls.get(part["index"], "") + part["function"].get("arguments", "")
        reason = choice["finish_reason"] or reason
    return text, [json.loads(each) for each in calls.values()], reason


def of_chat(body: Any) -> tuple[str, list[Any], Any]:
    choice = body["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    arguments = [json.loads(each["function"]["arguments"]) for each in calls]
    return choice["message"].get("content") or "", arguments, choice["finish_reason"]


def of_response(body: Any) -> tuple[str, list[Any], Any]:
    texts = [part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]]
    calls = [json.loads(item["arguments"]) for item in body["output"] if item["type"] == "function_call"]
    return "".join(texts), calls, body["status"]


def of_message(body: Any) -> tuple[str, list[Any], Any]:
    texts = [block["text"] for block in body["content"] if block["type"] == "text"]
    return "".join(texts), [b["input"] for b in body["content"] if b["type"] == "tool_use"], body["stop_reason"]


def of_ollama(body: Any) -> tuple[str, list[Any], Any]:
    calls = body["message"].get("tool_calls") or []
    return body["message"]["content"], [each["function"]["arguments"] for each in calls], body["done_reason"]


@pytest.mark.parametrize(("path", "stream"), [("/v1/messages", False), ("/api/chat", False), ("/api/chat", True)])
def test_line_ends_in_strings_of_arguments(
    http: httpx.Client, cloud: ScriptedProvider, path: str, stream: bool
) -> None:
    calls = {"content": None, "tool_calls": [call('{"code":\n"if x:\n\ty()\r\n"}', index=0)]}
    cloud.says(events(calls, finish="tool_calls") if stream else whole(calls, "tool_calls"))
    assert ask(http, path, stream=stream)[1] == [{"code": "if x:\n\ty()\r\n"}]


@EVERYWHERE
@pytest.mark.parametrize("begun", [(), ({"content": "Well. "}, {"content": "So."})], ids=["alone", "after deltas"])
@pytest.mark.parametrize("calls", [None, [call('{"path": "one"}')]], ids=["text", "calls"])
def test_a_stream_that_ends_with_the_whole_message(
    http: httpx.Client, cloud: ScriptedProvider, path: str, begun: tuple[dict[str, Any], ...], calls: Any
) -> None:
    message = {"role": "assistant", "content": "Well. So.", "tool_calls": calls}
    deltas = [*begun, *([{"tool_calls": calls}] if begun and calls else [])]
    end = whole(message, "tool_calls" if calls else "stop").decode()
    cloud.says(events(*deltas, finish=None, done=False) + f"data: {end}\n\ndata: [DONE]\n\n")
    assert ask(http, path, stream=True)[:2] == ("Well. So.", [{"path": "one"}] if calls else [])


@EVERYWHERE
@pytest.mark.parametrize("ascii_only", [False, True])
def test_line_ends_of_unicode_split_no_event(
    http: httpx.Client, cloud: ScriptedProvider, path: str, ascii_only: bool
) -> None:
    text = "a\u2028b\u2029c\x85d"
    cloud.says(events({"content": text}) if ascii_only else events({"content": "\0"}).replace("\\u0000", text))
    assert ask(http, path, stream=True)[0] == text  # `ask` splits lines like httpx.iter_lines()


@EVERYWHERE
@BOTH
def test_calls_that_all_have_the_index_0(http: httpx.Client, cloud: ScriptedProvider, path: str, stream: bool) -> None:
    paths = [{"path": "one"}, {"path": "two"}]
    calls = [call(json.dumps(each), index=0) for each in paths]
    pieces = [{"index": 0, "function": {"arguments": part}} for part in ('{"pa', 'th": "three"}')]
    begun = {**call("", index=0), "id": "third"}
    deltas = [{"tool_calls": [each]} for each in (*calls, begun, *pieces)]
    if stream:
        cloud.says(events({"role": "assistant", "content": ""}, *deltas, finish="tool_calls"))
        paths.append({"path": "three"})
    else:
        cloud.says(whole({"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls"))
    assert ask(http, path, stream=stream)[1] == paths


@EVERYWHERE
def test_streamed_calls_without_ids(http: httpx.Client, cloud: ScriptedProvider, path: str) -> None:
    paths = [{"path": "one"}, {"path": "two"}]
    calls = [{"index": 0, "function": {"name": "read", "arguments": json.dumps(each)}} for each in paths]
    begun = {"index": 0, "function": {"name": "read", "arguments": ""}}
    pieces = [{"index": 0, "function": {"name": "read", "arguments": part}} for part in ('{"pa', 'th": "three"}')]
    cloud.says(events(*({"tool_calls": [each]} for each in (*calls, begun, *pieces)), finish="tool_calls"))
    assert ask(http, path, stream=True)[1] == [*paths, {"path": "three"}]


@EVERYWHERE
@BOTH
@pytest.mark.parametrize(
    "finish", ["stop", "STOP", "eos", "tool_use", "end_turn", "tool_calls", "TOOL_CALLS", "tool_call", "function_call"]
)
def test_finish_reasons_of_calls(
    http: httpx.Client, cloud: ScriptedProvider, path: str, stream: bool, finish: str
) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call('{"path": "one"}', index=0)]}
    cloud.says(events(message, finish=finish) if stream else whole(message, finish))
    _, calls, reason = ask(http, path, stream=stream)
    assert calls == [{"path": "one"}]
    expected = {"/v1/responses": "completed", "/v1/messages": "tool_use", "/api/chat": "stop"}
    assert reason == expected.get(path, "tool_calls")


@BOTH
@pytest.mark.parametrize(("finish", "usual"), [("stop", "stop"), ("STOP", "stop"), ("tool_calls", "tool_calls")])
def test_finish_reasons_of_a_forced_call(
    http: httpx.Client, cloud: ScriptedProvider, stream: bool, finish: str, usual: str
) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call('{"path": "one"}', index=0)]}
    cloud.says(events(message, finish=finish) if stream else whole(message, finish))
    forced = {"tool_choice": {"type": "function", "function": {"name": "read"}}}
    assert ask(http, "/v1/chat/completions", stream=stream, **forced)[2] == usual  # OpenAI sends `stop`


@BOTH
@pytest.mark.parametrize(("finish", "usual"), [("function_call", "function_call"), ("Length", "length")])
def test_finish_reasons_without_tool_calls(
    http: httpx.Client, cloud: ScriptedProvider, stream: bool, finish: str, usual: str
) -> None:
    message = {"role": "assistant", "content": None, "function_call": {"name": "read", "arguments": "{}"}}
    cloud.says(events(message, finish=finish) if stream else whole(message, finish))
    legacy = {"tools": None, "functions": [FUNCTION["function"]]}
    assert ask(http, "/v1/chat/completions", stream=stream, **legacy)[2] == usual


@EVERYWHERE
@BOTH
@pytest.mark.parametrize("arguments", ['{"path": "one"}', {"path": "one"}], ids=["text", "object"])
def test_a_legacy_function_call_is_a_tool_call(
    http: httpx.Client, cloud: ScriptedProvider, path: str, stream: bool, arguments: Any
) -> None:
    called = {"function_call": {"name": "read", "arguments": arguments}}
    pieces = [{"name": "read", "arguments": '{"pa'}, {"arguments": 'th": "one"}'}]
    deltas = [{"function_call": piece} for piece in pieces] if isinstance(arguments, str) else [called]
    said = {"role": "assistant", "content": None, **called}
    cloud.says(events(*deltas, finish="function_call") if stream else whole(said, "function_call"))
    _, calls, reason = ask(http, path, stream=stream)
    expected = {"/v1/responses": "completed", "/v1/messages": "tool_use", "/api/chat": "stop"}
    assert (calls, reason) == ([{"path": "one"}], expected.get(path, "tool_calls"))


@EVERYWHERE
@BOTH
def test_calls_with_an_empty_list_as_content(
    http: httpx.Client, cloud: ScriptedProvider, path: str, stream: bool
) -> None:
    said = {"role": "assistant", "content": [], "tool_calls": [call('{"path": "one"}', index=0)]}
    cloud.says(events(said, {"content": []}, finish="tool_calls") if stream else whole(said, "tool_calls"))
    assert ask(http, path, stream=stream)[:2] == ("", [{"path": "one"}])


def test_an_empty_list_alone_is_no_answer(http: httpx.Client, cloud: ScriptedProvider) -> None:
    for _ in range(3):
        cloud.says(json.dumps({**HEAD, "choices": [{"index": 0, "message": {"content": []}}]}).encode())
    reply = http.post("/v1/chat/completions", json={"model": "cloud", "messages": HELLO})
    assert reply.status_code == 502


def ids_of(http: httpx.Client, path: str, *, stream: bool) -> list[tuple[str, str]]:
    """Return the ID and name of each call, in order."""
    reply = http.post(path, json={"model": "cloud", "stream": stream, **ASKED[path]})
    lines = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if '{"' in line[:8]]
    if path == "/v1/responses":
        items = lines[-1].get("response", lines[-1])["output"]
        return [(item["call_id"], item["name"]) for item in items if item["type"] == "function_call"]
    if path == "/v1/messages":
        blocks = [line["content_block"] for line in lines if "content_block" in line] or lines[-1]["content"]
        return [(block["id"], block["name"]) for block in blocks if block["type"] == "tool_use"]
    if path == "/api/chat":
        calls = [each for line in lines for each in line["message"].get("tool_calls", ())]
        return [(each["id"], each["function"]["name"]) for each in calls]
    said = [choice.get("delta") or choice.get("message") for line in lines for choice in line["choices"]]
    pieces = [each for message in said if message for each in message.get("tool_calls", ())]
    return [(each["id"], each["function"]["name"]) for each in pieces if "id" in each]


@EVERYWHERE
@BOTH
@pytest.mark.parametrize("given", [{}, {"id": None}, {"id": ""}, {"id": "same"}])
@pytest.mark.parametrize("indices", [(0, 1), (0, 0)])
def test_each_call_has_an_id_of_its_own(
    http: httpx.Client,
    cloud: ScriptedProvider,
    path: str,
    stream: bool,
    given: dict[str, Any],
    indices: tuple[int, int],
) -> None:
    calls = [call('{"path": "one"}', index=index) for index in indices]
    calls = [{**{name: value for name, value in each.items() if name != "id"}, **given} for each in calls]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    cloud.says(events(said, finish="tool_calls") if stream else whole(said, "tool_calls"))
    ids, names = zip(*ids_of(http, path, stream=stream), strict=True)
    assert names == ("read", "read")
    assert all(ids) and ids[0] != ids[1]
    assert ids[0] == "same" or not given.get("id")


@EVERYWHERE
def test_later_pieces_that_repeat_or_empty_id_and_name(http: httpx.Client, cloud: ScriptedProvider, path: str) -> None:
    def more(arguments: str, identifier: str, name: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"tool_calls": [{"index": 0, "id": identifier, "type": "function", "function": function}]}

    begun = {"tool_calls": [{**call("", index=0), "id": "c1"}]}
    cloud.says(events(begun, more('{"path": ', "", ""), more('"one"}', "c1", ""), more("", "c1", "read")))
    assert ids_of(http, path, stream=True) == [("c1", "read")]
    cloud.says(events(begun, more('{"path": ', "", ""), more('"one"}', "c1", ""), more("", "c1", "read")))
    assert ask(http, path, stream=True)[1] == [{"path": "one"}]


@EVERYWHERE
@BOTH
@pytest.mark.parametrize(("finish", "usual"), [("eos", "stop"), ("max_tokens", "length"), ("tool_calls", "tool_calls")])
def test_finish_reasons_of_texts(
    http: httpx.Client, cloud: ScriptedProvider, path: str, stream: bool, finish: str, usual: str
) -> None:
    message = {"role": "assistant", "content": "Hi."}
    cloud.says(events(message, finish=finish) if stream else whole(message, finish))
    text, _, reason = ask(http, path, stream=stream)
    expected = {
        "/v1/chat/completions": usual,
        "/v1/responses": "incomplete" if usual == "length" else "completed",
        "/v1/messages": "max_tokens" if usual == "length" else "end_turn",
        "/api/chat": "length" if usual == "length" else "stop",
    }
    assert (text, reason) == ("Hi.", expected[path])


def test_interleaved_pieces_and_missing_indices(http: httpx.Client, cloud: ScriptedProvider) -> None:
    def more(arguments: str, **named: Any) -> dict[str, Any]:
        return {"tool_calls": [{"function": {"arguments": arguments}, **named}]}

    first, second = ({**call(""), "id": name} for name in "ab")
    pieces = [more('{"path":', id="a"), more("{}", id="b"), more("1}", id="a")]
    cloud.says(events({"tool_calls": [first]}, {"tool_calls": [second]}, *pieces))
    assert ask(http, "/v1/chat/completions", stream=True)[1] == [{"path": 1}, {}]
    begun = [{**first, "index": 3}, {**second, "index": 4}]  # numbers that do not start at 0
    pieces = [more('{"path":', index=3), more("{}", index=4), more("2}", index=3)]
    cloud.says(events({"tool_calls": begun}, *pieces))
    assert ask(http, "/v1/chat/completions", stream=True)[1] == [{"path": 2}, {}]


@EVERYWHERE
@BOTH
@pytest.mark.parametrize("arguments", [{"path": "a", "deep": [1.5, None]}, {}])
def test_arguments_as_an_object(
    http: httpx.Client, cloud: ScriptedProvider, path: str, stream: bool, arguments: dict[str, Any]
) -> None:
    said = {"role": "assistant", "content": None, "tool_calls": [call(arguments, index=0)]}
    cloud.says(events(said, finish="tool_calls") if stream else whole(said, "tool_calls"))
    assert ask(http, path, stream=stream)[1] == [arguments]


@pytest.mark.parametrize("path", list(ASKED)[2:])
@pytest.mark.parametrize(
    ("text", "finish", "arguments", "note"),
    [
        ("5", "tool_calls", {"raw_arguments": "5"}, "are not a JSON object"),
        ("{bad", "tool_calls", {"raw_arguments": "{bad"}, "are not a JSON object"),
        ("{bad", "length", {"raw_arguments": "{bad"}, "are not a JSON object"),
        ('{"path": "a", "more": "lor', "tool_calls", {"raw_arguments": '{"path": "a", "more": "lor'}, "are not a JSON"),
        ('{"path": "a", "more": "lor', "length", {"path": "a", "more": "lor"}, "were cut by the token limit"),
        ('{"path": [1, {"b', "length", {"path": [1, {}]}, "were cut by the token limit"),
        ("{", "length", {}, "were cut by the token limit"),
        ("", "length", {}, "were cut by the token limit"),
        (DEEP, "tool_calls", {"raw_arguments": DEEP}, "are not a JSON object"),
        ('{"path": "NaN", "n": -Infinity}', "tool_calls", {"path": "NaN", "n": None}, "hold NaN, Infinity or too"),
        ('{"path": "\\ud83d", "n": 1e400}', "tool_calls", {"path": "\ud83d", "n": None}, "or too large a number"),
        ('{"path": "NaN"}', "tool_calls", {"path": "NaN"}, None),
    ],
)  # fmt: skip
@BOTH
def test_an_answer_arrives_with_arguments_that_are_no_object(
    http: httpx.Client, cloud: ScriptedProvider, path: str, text: str, finish: str, arguments: Any, note: str | None,
    stream: bool,
) -> None:  # fmt: skip
    said = {"role": "assistant", "content": "Let me.", "tool_calls": [call(text, index=0)]}
    cloud.says(events(said, finish=finish) if stream else whole(said, finish))
    reply = http.post(path, json={"model": "cloud", "stream": stream, **ASKED[path]})
    assert reply.status_code == 200
    last = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if '"updraft"' in line][-1]
    notes: list[str] = last["updraft"].get("notes", [])
    assert [note in each and "'read'" in each for each in notes if note] == [True] * bool(note), notes
    if path == "/api/chat" or not stream:  # the stream of a message holds the model's text
        read = {"/v1/messages": of_message, "/api/chat": of_ollama}[path]
        body = [json.loads(line) for line in reply.text.splitlines()][-2 if stream else -1]
        body = {"done_reason": None, **body, **({"message": body["message"]} if stream else {})}
        assert read(body)[1] == [arguments]


@EVERYWHERE
@BOTH
@pytest.mark.parametrize("calls", [[], [call("{}")]])
def test_no_finish_reason(
    http: httpx.Client, cloud: ScriptedProvider, path: str, stream: bool, calls: list[dict[str, Any]]
) -> None:
    said = {"role": "assistant", "content": "Forty-two.", **({"tool_calls": calls} if calls else {})}
    cloud.says(events(said, finish=None) if stream else whole(said, None))
    words = {"/v1/responses": ("completed",) * 2, "/api/chat": ("stop",) * 2, "/v1/messages": ("end_turn", "tool_use")}
    reason = words.get(path, ("stop", "tool_calls"))[bool(calls)]
    assert ask(http, path, stream=stream) == ("Forty-two.", [{}] if calls else [], reason)


@BOTH
def test_no_finish_reason_of_a_text(http: httpx.Client, cloud: ScriptedProvider, stream: bool) -> None:
    text = {"id": "t", "object": "text_completion", "choices": [{"index": 0, "text": "two"}]}
    raw = json.dumps(text)
    cloud.says(f"data: {raw}\n\ndata: [DONE]\n\n" if stream else raw.encode())
    reply = http.post("/v1/completions", json={"model": "cloud", "prompt": "one", "stream": stream})
    chunks = [reply.json()] if not stream else [json.loads(e[6:]) for e in reply.text.split("\n\n") if "{" in e]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "two"


def test_a_stream_that_breaks_off_or_says_nothing_has_no_finish_reason(
    http: httpx.Client, cloud: ScriptedProvider
) -> None:
    asked = {"model": "cloud", "messages": HELLO, "stream": True}
    cloud.says(events({"content": "Forty"}, finish=None, done=False))
    assert "no finish reason arrived" in http.post("/v1/chat/completions", json=asked).text
    cloud.says(events({"role": "assistant"}, finish=None))
    reply = http.post("/v1/chat/completions", json=asked)
    assert (reply.status_code, "before any content" in reply.text) == (502, True)


@pytest.mark.parametrize("first", [{"content": "Os"}, {"role": "", "content": "Os"}, {"role": None, "content": "Os"}])
def test_the_role_comes_once_and_first(http: httpx.Client, cloud: ScriptedProvider, first: dict[str, Any]) -> None:
    cloud.says(events(first, {"role": "assistant", "content": "lo"}))
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="x", max_retries=0) as client:
        with client.chat.completions.stream(model="cloud", messages=HELLO) as stream:
            message = stream.get_final_completion().choices[0].message
        assert (message.role, message.content) == ("assistant", "Oslo")
        cloud.says(whole({"content": "Oslo"}, "stop"))
        whole_answer = client.chat.completions.create(model="cloud", messages=HELLO)
        assert whole_answer.choices[0].message.role == "assistant"


@EVERYWHERE
@pytest.mark.parametrize(("message", "finish"), [({"content": None}, "length"), ({}, "length"), ({}, "stop")])
def test_an_answer_whose_tokens_all_went_into_thoughts(
    http: httpx.Client, cloud: ScriptedProvider, path: str, message: dict[str, Any], finish: str
) -> None:
    cloud.says(whole({"role": "assistant", **message}, finish))
    cloud.says(whole({"role": "assistant", **message}, finish))
    text, calls, _ = ask(http, path, stream=False)
    assert (text, calls) == ("", [])
    about = http.post(path, json={"model": "cloud", "stream": False, **ASKED[path]}).json()["updraft"]
    assert (about["route"], about["cloud_tokens"]) == ("cloud", 4)


VECTOR = [0.5, -1.25, 3.0, 0.0]
PACKED = base64.b64encode(struct.pack("<4f", *VECTOR)).decode()


EXACT = '{"total": 12345678901234567890123.5}'


@pytest.mark.parametrize(
    ("path", "turn"),
    [
        ("/v1/messages", '{"content": [{"type": "tool_use", "id": "t", "name": "read", "input": %s}]'),
        ("/api/chat", '{"content": "", "tool_calls": [{"function": {"name": "read", "arguments": %s}}]'),
    ],
)
def test_numbers_in_earlier_arguments_keep_their_digits(
    http: httpx.Client, cloud: ScriptedProvider, path: str, turn: str
) -> None:
    cloud.says(whole({"content": "Oslo"}, "stop"))
    asked = json.dumps({"model": "cloud", "stream": False, **ASKED[path], "messages": [*HELLO, "TURN", *HELLO]})
    body = asked.replace('"TURN"', turn % EXACT + ', "role": "assistant"}')
    assert http.post(path, content=body).status_code == 200
    assert cloud.asked[-1].body["messages"][1]["tool_calls"][0]["function"]["arguments"] == EXACT


@pytest.mark.parametrize(
    ("path", "name", "usual"),
    [
        ("/v1/chat/completions", "Max_Tokens", "max_tokens"),
        ("/v1/chat/completions", "Model", "model"),
        ("/v1/chat/completions", "N", "n"),
        ("/v1/completions", "Best_Of", "best_of"),
        ("/v1/images/generations", "N", "n"),
    ],
)
def test_fields_that_change_the_cost_have_one_spelling(
    http: httpx.Client, cloud: ScriptedProvider, path: str, name: str, usual: str
) -> None:
    count = len(cloud.asked)
    reply = http.post(path, json={"model": "cloud", "messages": HELLO, "prompt": "hello", name: 50})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    assert f"must be spelled {usual!r}" in reply.json()["error"]["message"]
    nested = http.post(path, json={"model": "cloud", "messages": HELLO, "options": {"Num_Predict": 50}})
    assert (nested.status_code, len(cloud.asked)) == (400, count)


@pytest.mark.parametrize("sent", [VECTOR, PACKED])
@pytest.mark.parametrize(("encoding", "expected"), [("base64", PACKED), ("float", VECTOR), (None, VECTOR)])
def test_vectors_have_the_encoding_that_was_asked_for(
    http: httpx.Client, cloud: ScriptedProvider, sent: Any, encoding: Any, expected: Any
) -> None:
    answer = {"object": "list", "data": [{"index": index, "embedding": sent} for index in (1, 0)]}
    cloud.says(answer)
    cloud.says(answer)
    asked = {"model": "cloud", "input": ["a", "b"], **({"encoding_format": encoding} if encoding else {})}
    data = http.post("/v1/embeddings", json=asked).json()["data"]
    assert [(each["index"], each["embedding"]) for each in data] == [(0, expected), (1, expected)]
    lists = http.post("/api/embed", json={"model": "cloud", "input": ["a", "b"]}).json()["embeddings"]
    assert lists == [VECTOR, VECTOR]


@pytest.mark.parametrize(("encoding", "sent"), [("base64", ["x"]), ("float", "*"), ("float", "AAA=")])
def test_a_vector_that_nobody_can_read_is_an_error_of_the_cloud(
    http: httpx.Client, cloud: ScriptedProvider, encoding: str, sent: Any
) -> None:
    cloud.says({"object": "list", "data": [{"index": 0, "embedding": sent}]})
    reply = http.post("/v1/embeddings", json={"model": "cloud", "input": "a", "encoding_format": encoding})
    assert (reply.status_code, "neither numbers nor base64" in reply.text) == (502, True)
