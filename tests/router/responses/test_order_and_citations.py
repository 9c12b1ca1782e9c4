"""Answers of clouds in the order in which they were written, with their citations, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from provider_daemons import running_daemons
from scripted_provider import ScriptedProvider, anthropic_says, events, running_provider
from updraft.accounting.token_estimate import text_bytes
from updraft.protocol.requests import read_chat
from updraft.router.config import CacheSettings
from updraft.router.tiers.answer_shapes import CallIndices

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
USER = {"role": "user", "content": "Hi"}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
OLLAMA = "/api/chat"
SEARCHED = {"type": "search_result_location", "source": "https://a.example/x", "title": "A", "cited_text": "q",
            "search_result_index": 0, "start_block_index": 0, "end_block_index": 1}  # fmt: skip
READ = {"type": "char_location", "document_index": 0, "document_title": "D", "cited_text": "r", "start_char_index": 0,
        "end_char_index": 1}  # fmt: skip
#: A message in which thoughts, texts and calls alternate.
BLOCKS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "I look.", "signature": "c2ln"},
    {"type": "text", "text": "Of \u00e9: "},
    {"type": "text", "text": "rain", "citations": [SEARCHED]},
    {"type": "text", "text": ". "},
    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
    {"type": "thinking", "thinking": "Again.", "signature": "bW9yZQ=="},
    {"type": "text", "text": "And "},
    {"type": "text", "text": "sun", "citations": [READ, SEARCHED]},
    {"type": "tool_use", "id": "t2", "name": "weather", "input": {"city": "Bern"}},
]


@pytest.fixture(scope="module")
def cloud() -> Iterator[ScriptedProvider]:
    with running_provider() as provider:
        yield provider


@pytest.fixture(scope="module")
def daemons(cloud: ScriptedProvider) -> Iterator[dict[str, str]]:
    """URLs of daemons, by the provider of their cloud. Requests with temperature 0 are answered from the cache."""
    with running_daemons(cloud, "openai", "anthropic", "gemini", cache=CacheSettings(max_mb=8)) as urls:
        yield urls


def ask(url: str, path: str, turns: list[Any], *, stream: bool, **more: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, or the whole answer as the only one."""
    tools: Any = {
        RESPONSES: [{"type": "function", "name": "weather", "parameters": SCHEMA}],
        MESSAGES: [{"name": "weather", "input_schema": SCHEMA}],
    }.get(path, [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}])
    body = {"model": "cloud", "tools": tools, "stream": stream, ("input" if path == RESPONSES else "messages"): turns}
    reply = httpx.post(f"{url}{path}", json=body | ({"max_tokens": 99} if path == MESSAGES else {}) | more, timeout=60)
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines()] if stream else [reply.text]
    return [json.loads(line) for line in lines if line.startswith("{")]


def openai_says(cloud: ScriptedProvider, message: dict[str, Any], finish: str, *, stream: bool) -> None:
    """Say a message, or stream it with its text in two pieces and then its other fields."""
    head = {"id": "c", "created": 1, "model": "m"}
    if not stream:
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
        cloud.says({**head, "object": "chat.completion", "choices": [choice]})
        return
    text = message.get("content") or ""
    others = [{name: value} for name, value in message.items() if name != "content"]
    deltas = [{"role": "assistant"}, {"content": text[:2]}, {"content": text[2:]}, *others]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    cloud.says(events(*({**head, "object": "chat.completion.chunk", "choices": [each]} for each in choices)))


def content_of(answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the blocks of a message, assembled as Anthropic's client does it."""
    content: list[Any] = answer[0].get("content") or []
    for event in answer:
        if event["type"] == "content_block_start":
            content.append({**event["content_block"], "pieces": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], content[event["index"]]
            assert event["index"] == len(content) - 1, "only the last block is open"
            block["pieces"] += delta.get("partial_json", "")
            for name in ("text", "thinking", "signature"):
                block |= {name: block[name] + delta[name]} if name in delta else {}
            if "citation" in delta:
                block["citations"] = [*block.get("citations", ()), delta["citation"]]
    for block in content:
        if pieces := block.pop("pieces", ""):
            block["input"] = json.loads(pieces)
    return content


def message_in(answer: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of a chat message that this module tests, from a whole answer or a stream."""
    message: dict[str, Any] = {"content": "", "annotations": [], "citations": [], "tool_calls": []}
    for choice in (choice for event in answer for choice in event["choices"]):
        said = choice.get("delta", choice.get("message"))
        message["content"] += said.get("content") or ""
        for name in ("annotations", "citations"):
            added = [{key: value for key, value in each.items() if key != "index"} for each in said.get(name) or ()]
            message[name] += added
        message["tool_calls"] += [each for each in said.get("tool_calls") or () if each.get("id")]
    return message


def notes_in(answer: list[dict[str, Any]]) -> list[str]:
    explained = [event.get("response", event).get("updraft") for event in answer]
    return [note for about in explained if about for note in about.get("notes") or ()]


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_arrives_as_it_was_written(cloud: ScriptedProvider, daemons: dict[str, str], stream: bool) -> None:
    anthropic_says(cloud, BLOCKS, "tool_use", stream=stream)
    answer = ask(daemons["anthropic"], MESSAGES, [USER], stream=stream)
    assert content_of(answer) == BLOCKS
    assert not notes_in(answer)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_keeps_order_and_citations(cloud: ScriptedProvider, daemons: dict[str, str], stream: bool) -> None:
    anthropic_says(cloud, BLOCKS, "tool_use", stream=stream)
    answer = ask(daemons["anthropic"], RESPONSES, [USER], stream=stream)
    output = answer[-1].get("response", answer[-1])["output"]
    kinds = ["reasoning", "message", "function_call"]
    assert [item["type"] for item in output] == [*kinds, *kinds]
    parts = [item["content"][0] for item in output if item["type"] == "message"]
    assert [part["text"] for part in parts] == ["Of \u00e9: rain. ", "And sun"]
    for part, cited in zip(parts, ("rain", "sun"), strict=True):
        (annotation,) = part["annotations"]
        assert part["text"][annotation["start_index"] : annotation["end_index"]] == cited
        assert (annotation["type"], annotation["url"]) == ("url_citation", SEARCHED["source"])
    calls = [json.loads(item["arguments"]) for item in output if "arguments" in item]
    assert calls == [{"city": "Oslo"}, {"city": "Bern"}]
    assert notes_in(answer)[-1:] == ["citations without a URL were left out: 1"]
    if stream:
        added = [event for event in answer if event["type"] == "response.output_text.annotation.added"]
        assert [event["annotation"] for event in added] == [part["annotations"][0] for part in parts]
        assert [output[event["output_index"]]["id"] for event in added] == [event["item_id"] for event in added]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_gets_annotations(cloud: ScriptedProvider, daemons: dict[str, str], stream: bool) -> None:
    anthropic_says(cloud, BLOCKS, "tool_use", stream=stream)
    message = message_in(ask(daemons["anthropic"], CHAT, [USER], stream=stream))
    urls = [annotation["url_citation"] for annotation in message["annotations"]]
    assert [message["content"][url["start_index"] : url["end_index"]] for url in urls] == ["rain", "sun"]
    assert [url["url"] for url in urls] == [SEARCHED["source"]] * 2
    assert message["citations"] == [SEARCHED, READ, SEARCHED]
    assert [call["id"] for call in message["tool_calls"]] == ["t1", "t2"]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
def test_the_order_of_gemini(cloud: ScriptedProvider, daemons: dict[str, str], path: str, stream: bool) -> None:
    parts: list[dict[str, Any]] = [
        {"text": "I look."},
        {"functionCall": {"id": "c1", "name": "weather", "args": {"city": "Oslo"}}},
        {"text": "Hm.", "thought": True},
        {"text": "Rain."},
    ]
    body = {"candidates": [{"content": {"role": "model", "parts": parts}, "finishReason": "STOP"}]}
    cloud.says(events(body) if stream else body)
    answer = ask(daemons["gemini"], path, [USER], stream=stream)
    if path == MESSAGES:
        assert [block["type"] for block in content_of(answer)] == ["text", "tool_use", "thinking", "text"]
    else:
        output = answer[-1].get("response", answer[-1])["output"]
        assert [item["type"] for item in output] == ["message", "function_call", "reasoning", "message"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
def test_citations_of_gemini(cloud: ScriptedProvider, daemons: dict[str, str], path: str, stream: bool) -> None:
    """Offsets of Gemini count bytes. Each event of a stream has a piece of a part."""
    texts = [
        {"text": "Hm.", "thought": True},
        {"text": "\u00c9t\u00e9: r"},
        {"text": "ain.", "thoughtSignature": "UzE="},
    ]
    if not stream:
        texts[1:] = [{"text": "\u00c9t\u00e9: rain.", "thoughtSignature": "UzE="}]
    rain = {"partIndex": 1, "startIndex": 7, "endIndex": 11, "text": "rain"}
    grounding = {
        "groundingChunks": [{"web": {"uri": "https://b.example"}}, {"web": {"uri": "https://a.example", "title": "A"}}],
        "groundingSupports": [{"segment": rain, "groundingChunkIndices": [1]}, {"groundingChunkIndices": None}],
    }
    source = {"startIndex": 0, "endIndex": 5, "uri": "https://c.example"}
    ended = {"finishReason": "STOP", "groundingMetadata": grounding, "citationMetadata": {"citationSources": [source]}}
    bodies: list[Any] = [{"candidates": [{"content": {"parts": [text]}}]} for text in texts]
    bodies = bodies if stream else [{"candidates": [{"content": {"parts": texts}}]}]
    bodies[-1]["candidates"][0] |= ended
    cloud.says(events(*bodies) if stream else bodies[0])
    answer = ask(daemons["gemini"], path, [USER], stream=stream)
    if path == MESSAGES:
        text = next(block for block in content_of(answer) if block["type"] == "text")
        assert [cited["url"] for cited in text["citations"]] == ["https://a.example", "https://c.example"]
        return
    if path == CHAT:
        message = message_in(answer)
        text, cited = message["content"], [each["url_citation"] for each in message["annotations"]]
    else:
        item = next(item for item in answer[-1].get("response", answer[-1])["output"] if item["type"] == "message")
        text, cited = item["content"][0]["text"], item["content"][0]["annotations"]
    assert [(each["url"], text[each["start_index"] : each["end_index"]]) for each in cited] == [
        ("https://a.example", "rain"),
        ("https://c.example", "\u00c9t\u00e9"),
    ]


@pytest.mark.parametrize("part_index", [None, 0, 1, 2, 9])
@pytest.mark.parametrize(("start", "end"), [(0, 5), (8, 13), (90, 95), (9, 2)])
@pytest.mark.parametrize("stream", [False, True])
def test_citations_of_gemini_whose_offsets_do_not_fit(
    cloud: ScriptedProvider, daemons: dict[str, str], stream: bool, start: int, end: int, part_index: int | None
) -> None:
    """Gemini may leave out `partIndex` beside thoughts, and a stream splits parts. The segment's text decides."""
    texts = [{"text": "Hm.", "thought": True}, {"text": "H\u00e9llo "}, {"text": "world."}]
    segment = {"partIndex": part_index, "startIndex": start, "endIndex": end, "text": "world"}
    grounding = {
        "groundingChunks": [{"web": {"uri": "https://a.example"}}],
        "groundingSupports": [{"segment": segment, "groundingChunkIndices": [0]}],
    }
    bodies: list[Any] = [{"candidates": [{"content": {"parts": [text]}}]} for text in texts]
    bodies = bodies if stream else [{"candidates": [{"content": {"parts": texts}}]}]
    bodies[-1]["candidates"][0] |= {"finishReason": "STOP", "groundingMetadata": grounding}
    cloud.says(events(*bodies) if stream else bodies[0])
    [cited] = message_in(ask(daemons["gemini"], CHAT, [USER], stream=stream))["annotations"]
    assert (cited["url_citation"]["start_index"], cited["url_citation"]["end_index"]) == (6, 11)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
def test_parts_that_are_left_out(cloud: ScriptedProvider, daemons: dict[str, str], path: str, stream: bool) -> None:
    code = [{"executableCode": {"code": "1"}}, {"inlineData": {"data": "AAAA"}}, {"executableCode": {"code": "2"}}]
    body = {"candidates": [{"content": {"parts": code}, "finishReason": "STOP"}]}
    cloud.says(events(body) if stream else body)
    notes = notes_in(ask(daemons["gemini"], path, [USER], stream=stream))
    assert "parts of the answer were left out: executableCode, inlineData" in notes


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
def test_blocks_that_are_left_out(cloud: ScriptedProvider, daemons: dict[str, str], path: str, stream: bool) -> None:
    searched = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []}
    unknown = {"type": "new_kind", "data": "x"}
    blocks = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
        searched,
        unknown,
        *BLOCKS[:2],
    ]
    anthropic_says(cloud, blocks, "end_turn", stream=stream)
    notes = notes_in(ask(daemons["anthropic"], path, [USER], stream=stream))
    assert "blocks of the answer were left out: server_tool_use, web_search_tool_result, new_kind" in notes


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_after_a_tool_call(cloud: ScriptedProvider, daemons: dict[str, str], stream: bool) -> None:
    anthropic_says(cloud, BLOCKS[:5], "stop_sequence", stream=stream, stopped_by="Z")
    answer = ask(daemons["anthropic"], MESSAGES, [USER], stream=stream, stop_sequences=["Z"])
    (ended,) = [each for each in ({**event, **event.get("delta", {})} for event in answer) if each.get("stop_reason")]
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", "Z")


@pytest.mark.parametrize("stream", [False, True])
def test_a_cached_answer_keeps_its_order(cloud: ScriptedProvider, daemons: dict[str, str], stream: bool) -> None:
    anthropic_says(cloud, BLOCKS, "tool_use", stream=False)
    for is_repeat in (False, True):
        more = {"updraft": {}, "temperature": 0, "top_p": 0.5 if stream else 0.6}
        answer = ask(daemons["anthropic"], MESSAGES, [USER], stream=stream and is_repeat, **more)
        assert content_of(answer) == BLOCKS
    assert not cloud.answers


def test_deltas_of_an_answer_do_not_go_back(cloud: ScriptedProvider, daemons: dict[str, str]) -> None:
    anthropic_says(cloud, BLOCKS, "tool_use", stream=False)
    (answer,) = ask(daemons["anthropic"], CHAT, [USER], stream=False)
    said = answer["choices"][0]["message"]
    assert text_bytes(said["deltas"]) > 0
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in said["tool_calls"]]
    openai_says(cloud, {"content": "So."}, "stop", stream=False)
    ask(daemons["openai"], CHAT, [USER, said, *results], stream=False)
    assert "deltas" not in cloud.asked[-1].body["messages"][1]


@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_api_has_no_place_for_citations(cloud: ScriptedProvider, daemons: dict[str, str], stream: bool) -> None:
    anthropic_says(cloud, BLOCKS, "tool_use", stream=stream)
    assert "citations were left out: 3" in notes_in(ask(daemons["anthropic"], OLLAMA, [USER], stream=stream))


URL = {"url": "https://a.example", "title": "A", "start_index": 3, "end_index": 7}


@pytest.mark.parametrize("stream", [False, True])
def test_annotations_of_openai(cloud: ScriptedProvider, daemons: dict[str, str], stream: bool) -> None:
    message = {"content": "So: rain.", "annotations": [{"type": "url_citation", "url_citation": URL}]}
    openai_says(cloud, message, "stop", stream=stream)
    answer = ask(daemons["openai"], RESPONSES, [USER], stream=stream)
    (item,) = answer[-1].get("response", answer[-1])["output"]
    assert item["content"][0]["annotations"] == [{"type": "url_citation", **URL}]
    openai_says(cloud, message, "stop", stream=stream)
    answer = ask(daemons["openai"], MESSAGES, [USER], stream=stream)
    citation = {"type": "web_search_result_location", "url": URL["url"], "title": "A"}
    cited = {**citation, "cited_text": "", "encrypted_index": ""}
    assert content_of(answer) == [{"type": "text", "text": "So: rain.", "citations": [cited]}]
    anthropic_says(cloud, [{"type": "text", "text": "Yes."}], "end_turn", stream=False)
    ask(
        daemons["anthropic"], MESSAGES, [USER, {"role": "assistant", "content": content_of(answer)}, USER], stream=False
    )
    sent = cloud.asked[-1].body["messages"][1]["content"]
    assert sent == [{"type": "text", "text": "So: rain."}], "Anthropic refuses citations that it has not encrypted"


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause", ["pause_turn", "compaction"])
def test_a_paused_turn_is_not_finished(
    cloud: ScriptedProvider, daemons: dict[str, str], path: str, stream: bool, pause: str
) -> None:
    anthropic_says(cloud, [{"type": "text", "text": "I search."}], pause, stream=stream)
    answer = ask(daemons["anthropic"], path, [USER], stream=stream)
    assert any("paused" in note for note in notes_in(answer))
    if path == MESSAGES:
        ends = [event.get("delta", event).get("stop_reason") for event in answer]
        assert [end for end in ends if end] == [pause]
    elif path == CHAT:
        choices = [choice for event in answer for choice in event["choices"]]
        assert [(each["finish_reason"], each["stop_reason"]) for each in choices if each.get("finish_reason")] == [
            ("length", pause)
        ]
    else:
        response = answer[-1].get("response", answer[-1])
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": pause})


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_context_has_its_own_stop_reason(cloud: ScriptedProvider, daemons: dict[str, str], stream: bool) -> None:
    anthropic_says(cloud, [{"type": "text", "text": "I"}], "model_context_window_exceeded", stream=stream)
    answer = ask(daemons["anthropic"], MESSAGES, [USER], stream=stream)
    ends = [event.get("delta", event).get("stop_reason") for event in answer]
    assert [end for end in ends if end] == ["model_context_window_exceeded"]


PATCH = 'say "\u00e9"\n\\'
CUSTOM = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": PATCH}}


def custom_pieces() -> list[dict[str, Any]]:
    """Return the delta of a custom tool's call, and the deltas with the pieces of its input."""
    begun = {"index": 0, **CUSTOM, "custom": {"name": "patch", "input": ""}}
    return [{"tool_calls": [each]} for each in (begun, *({"index": 0, "custom": {"input": x}} for x in PATCH))]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, OLLAMA])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_custom_tool(cloud: ScriptedProvider, daemons: dict[str, str], path: str, stream: bool) -> None:
    if stream:
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in custom_pieces()]
        choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
        cloud.says(events(*({"id": "c", "model": "m", "choices": [each]} for each in choices)))
    else:
        openai_says(cloud, {"content": None, "tool_calls": [CUSTOM]}, "tool_calls", stream=False)
    answer = ask(daemons["openai"], path, [USER], stream=stream)
    if path == CHAT:
        (call,) = message_in(answer)["tool_calls"]
        assert (call["type"], call["custom"]["name"]) == ("custom", "patch")
        return
    if path == OLLAMA:
        calls = [call for event in answer for call in event["message"].get("tool_calls", ())]
        assert [call["function"] for call in calls] == [{"index": 0, "name": "patch", "arguments": {"input": PATCH}}]
        return
    openai_says(cloud, {"content": "Yes."}, "stop", stream=False)
    if path == MESSAGES:
        (block,) = content_of(answer)
        assert block == {"type": "tool_use", "id": "c1", "name": "patch", "input": {"input": PATCH}}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": "done"}
        turns = [USER, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
        ask(daemons["openai"], path, turns, stream=False)
        function = cloud.asked[-1].body["messages"][1]["tool_calls"][0]["function"]
        assert (function["name"], json.loads(function["arguments"])) == ("patch", {"input": PATCH})
        return
    (item,) = answer[-1].get("response", answer[-1])["output"]
    assert {name: item[name] for name in ("type", "call_id", "name", "input")} == {
        "type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": PATCH
    }  # fmt: skip
    if stream:
        deltas = [event["delta"] for event in answer if event["type"] == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == PATCH
    turns = [USER, item, {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}]
    ask(daemons["openai"], path, turns, stream=False)
    _, called, result = cloud.asked[-1].body["messages"]
    assert called["tool_calls"] == [CUSTOM]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "done"}


def test_calls_of_custom_tools_with_one_index_are_two() -> None:
    pieces = [{"index": 0, **CUSTOM, "id": identifier} for identifier in ("c1", "c2")]
    assert [piece["index"] for piece in CallIndices().numbered(pieces)] == [0, 1]


def test_models_without_custom_tools_read_functions(cloud: ScriptedProvider, daemons: dict[str, str]) -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CUSTOM]}, result]
    anthropic_says(cloud, [{"type": "text", "text": "Yes."}], "end_turn", stream=False)
    ask(daemons["anthropic"], CHAT, messages, stream=False)
    block = cloud.asked[-1].body["messages"][1]["content"][0]
    assert block == {"type": "tool_use", "id": "c1", "name": "patch", "input": {"input": PATCH}}
    (call,) = read_chat({"model": "m", "messages": messages}).messages[1].tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("patch", {"input": PATCH})
