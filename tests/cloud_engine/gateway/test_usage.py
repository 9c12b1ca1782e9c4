"""The gateway's reading of streams that it does not decode: of our nodes, of vLLM's, and of others."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from updraft.cloud_engine.gateway.ledger.metering import UsageRow
from updraft.cloud_engine.gateway.limits.request_size import RequestSize, SizeFields, size_of
from updraft.cloud_engine.gateway.relay.answer_checks import written_bytes
from updraft.cloud_engine.gateway.relay.passthrough import PassthroughUsage
from updraft.cloud_engine.gateway.relay.usage import StreamMeter, UsageOptions, asking_for_usage, meter_whole

TEXT = '{"usage": {"completion_tokens": 9}},"usage":null'  # somebody's words


def event(usage: Any = ..., content: str | None = TEXT, compact: bool = True) -> bytes:
    delta = {"role": "assistant", "content": ""} if content is None else {"content": content}
    chunk: dict[str, Any] = {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": None}], "created": 1}
    if usage is not ...:
        chunk["usage"] = usage
    return b"data: " + json.dumps(chunk, separators=(",", ":") if compact else None).encode() + b"\n\n"


def last(usage: Any) -> bytes:
    return event(usage).replace(event(usage).partition(b'"choices":[')[2].partition(b"]")[0], b"", 1)


def so_far(tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": 7, "total_tokens": 7 + tokens, "completion_tokens": tokens}


def metered(events: list[bytes], asked: UsageOptions, *, running: bool) -> tuple[UsageRow, list[bytes]]:
    row = UsageRow(request_id="r")
    meter = StreamMeter(row, asked, running=running)
    sizes = [written_bytes(each[6:]) if each.startswith(b"data: {") else 0 for each in events]
    shown = [meter.shown(each, size) for each, size in zip(events, sizes, strict=True)]
    meter.settle()
    return row, [each for each in shown if each is not None]


@pytest.mark.parametrize("details", [{}, {"prompt_tokens_details": {"cached_tokens": 3}}])
def test_a_broken_stream_costs_what_its_last_chunk_said(details: dict[str, Any]) -> None:
    events = [event(None, None), *(event({**so_far(tokens), **details}) for tokens in (1, 4))]
    row, shown = metered(events, UsageOptions(), running=True)
    assert (row.prompt_tokens, row.completion_tokens) == (7, 4)
    assert shown == [event(content=None), event(), event()]
    row, shown = metered(events, UsageOptions(include_usage=True), running=True)
    assert row.completion_tokens == 4
    assert shown == [event(None, None), event(None), event(None)]
    row, shown = metered(events, UsageOptions(include_usage=True, continuous_usage_stats=True), running=True)
    assert row.completion_tokens == 4
    assert shown == events


def test_a_whole_stream_costs_what_its_end_says() -> None:
    whole = {**so_far(5), "completion_tokens_details": {"accepted_prediction_tokens": 2}}
    for usage in (whole, so_far(5)):
        row, shown = metered([event(so_far(5)), last(usage)], UsageOptions(), running=True)
        assert (row.completion_tokens, row.accepted_prediction_tokens) == (5, 2 if usage is whole else 0)
        assert shown == [event()]
        assert metered([last(usage)], UsageOptions(include_usage=True), running=True)[1] == [last(usage)]


@pytest.mark.parametrize("compact", [True, False])
def test_unreported_usage_is_estimated_from_the_text(compact: bool) -> None:
    """Four bytes are a token, and each chunk with text is at least one."""
    events = [event(content=None, compact=compact), *[event(compact=compact)] * 3]
    row, shown = metered([*events, b"data: [DONE]\n\n"], UsageOptions(), running=False)
    assert (row.prompt_tokens, row.completion_tokens) == (0, 3 * len(TEXT) // 4)
    assert shown == [*events, b"data: [DONE]\n\n"]
    call = b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\\""}}]}}]}\n\n'
    text = b'data: {"choices":[{"text":"\\"","index":0}],"usage":null}\n\n'
    assert metered([call, text], UsageOptions(), running=False)[0].completion_tokens == 2
    for delta in (
        {"tool_calls": [{"index": 0, "type": "custom", "custom": {"input": "TEXT"}}]},
        {"audio": {"transcript": "TEXT"}},
        {"reasoning_details": [{"text": "TEXT"}]},
        {"reasoning_content": "TEXT"},
        {"function_call": {"name": "f", "arguments": "TEXT"}},
        {"thinking": "TEXT"},
        {"thinking_blocks": [{"type": "thinking", "thinking": "TEXT"}]},
        {"reasoning_content": "TEXT", "thinking_blocks": [{"type": "thinking", "thinking": "TEXT"}]},
        {"role": "assistant", "content": "", "future": {"id": "1", "parts": ["TEXT"]}},
    ):
        chunk = b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"
        for text, tokens in ((b"Hi", 20), (b"x" * 510, 2550)):
            row, _ = metered([chunk.replace(b"TEXT", text)] * 20, UsageOptions(), running=False)
            assert row.completion_tokens == tokens, delta


def test_text_after_the_last_usage_is_estimated() -> None:
    """Some servers count at the beginning only, or now and then."""
    row, _ = metered([event(so_far(1)), *[event(content="x" * 400)] * 3], UsageOptions(), running=False)
    assert (row.prompt_tokens, row.completion_tokens) == (7, 301)
    for report in (event(so_far(50)), last(so_far(50))):
        row, _ = metered([event(), report, event(content="abc")], UsageOptions(), running=True)
        assert row.completion_tokens == 51


def test_a_whole_answer_without_usage_is_reckoned() -> None:
    """Its texts alone, of chats and completions. Vectors and documents are no answer of a model's."""
    for body, reckoned in (
        ({"choices": [{"message": {"role": "assistant", "content": "x" * 300}}]}, 100),
        ({"choices": [{"text": "abc"}, {"text": 'a\n"b"'}]}, 1 + 2),
        ({"choices": [{"text": "abc"}], "usage": {"prompt_tokens": 1, "completion_tokens": 9}}, 9),
        ({"data": [{"embedding": [0.1] * 100}]}, 0),
        ({"results": [{"document": {"text": "x" * 300}}]}, 0),
        ({"choices": [{"message": {"tool_calls": [{"type": "custom", "custom": {"input": "x" * 300}}]}}]}, 100),
        ({"choices": [{"message": {"content": None, "audio": {"transcript": "x" * 300}}}]}, 100),
    ):
        row = UsageRow(request_id="r")
        meter_whole(json.dumps(body).encode(), row, RequestSize())
        assert row.completion_tokens == reckoned, body


def test_unrequested_usage_of_other_servers_is_passed_on() -> None:
    """Some put the usage on the last chunk that has text."""
    events = [event(), event(so_far(2))]
    row, shown = metered(events, UsageOptions(include_usage=True), running=False)
    assert row.completion_tokens == 2
    assert shown == events


def test_only_who_knows_it_is_asked_for_running_usage() -> None:
    body = b'{"model":"m","stream":true,"stream_options":{"continuous_usage_stats":false,"other":[1]},"messages":[ ]}'
    asked = msgspec.json.decode(asking_for_usage(body, running=True))
    assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": True, "other": [1]}
    assert asked["messages"] == []
    asked = msgspec.json.decode(asking_for_usage(body, running=False))
    assert asked["stream_options"] == {"include_usage": True, "other": [1]}
    for body in (b'{"model":"m","stream_options":null}', b'{"model":"m"}'):
        assert msgspec.json.decode(asking_for_usage(body, running=False))["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("count", [1e308, 10**19, 2**63, -1])
def test_counts_that_cannot_be_are_not_metered(count: Any) -> None:
    """The table could not even hold them, and with them every row that waits would be lost."""
    usage = {"prompt_tokens": 7, "completion_tokens": count}
    texts = [event(content="a"), event(content="b")]
    assert metered([*texts, last(usage)], UsageOptions(), running=False)[0].completion_tokens == 2
    assert metered([event(usage), event(usage)], UsageOptions(), running=True)[0].prompt_tokens == 0


@pytest.mark.parametrize(
    "place",
    [
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "usage": ...}]},
        {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}], "x_groq": {"usage": ...}},
        {"choices": [], "usage": None, "x": {"y": {"usage": ...}}},
        {"usage": ..., "choices": [{"index": 0, "delta": {"content": ""}}]},
        {"id": "x", "object": "chat.completion.chunk", "usage": ...},
    ],
)
def test_usage_is_read_wherever_it_is(place: dict[str, Any]) -> None:
    """Reasoning that only the total counts is included, and the last report of a stream counts."""
    counts = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 2012, "details": {"a": {"b": {}}}}
    whole = json.dumps(place, default=lambda _: counts)
    row, _ = metered([event(), b"data: " + whole.encode() + b"\n\n"], UsageOptions(), running=False)
    assert (row.prompt_tokens, row.completion_tokens) == (10, 2002)
    row = UsageRow(request_id="r")
    meter_whole(whole.encode(), row, RequestSize())
    assert (row.prompt_tokens, row.completion_tokens) == (10, 2002)


def test_a_total_alone_is_split_by_the_estimate_of_the_prompt() -> None:
    answer, vectors = {"choices": [{"message": {}}]}, {"data": [{"embedding": [0.5]}]}
    for body, tokens in ((answer, (30, 970)), (vectors, (1000, 0))):
        row = UsageRow(request_id="r")
        meter_whole(json.dumps({**body, "usage": {"total_tokens": 1000}}).encode(), row, RequestSize(30))
        assert (row.prompt_tokens, row.completion_tokens) == tokens
    for usage in ({"total_tokens": 1000}, {"input_tokens": 30, "output_tokens": 1, "total_tokens": 1000}):
        row = UsageRow(request_id="r")
        PassthroughUsage("/v1/responses", row, 30).whole(json.dumps({"output": [], "usage": usage}).encode())
        assert (row.prompt_tokens, row.completion_tokens) == (30, 970)


def test_usage_without_completion_tokens_is_completed_from_the_text() -> None:
    """The prompt is as reported. A completion of 0 tokens is trusted only if `echo` repeats the prompt as text."""
    part, text = {"prompt_tokens": 10}, {"message": {"content": "x" * 300}}
    none, echoes = {**part, "completion_tokens": 0}, size_of(b"{}", SizeFields(echo=True))
    sizes = ((part, echoes, 100), (part, RequestSize(), 100), (none, RequestSize(), 100), (none, echoes, 0))
    for usage, size, tokens in sizes:
        row = UsageRow(request_id="r")
        meter_whole(json.dumps({"choices": [text], "usage": usage}).encode(), row, size)
        assert (row.prompt_tokens, row.completion_tokens) == (10, tokens)
    texts, running = [event(content="a")] * 2, [event(part, "a"), event(part, "b")]
    for events in ([*texts, last(part)], running, [*texts, last(none)], [event(none, "a")] * 2):
        row, _ = metered(events, UsageOptions(), running=True)
        assert (row.prompt_tokens, row.completion_tokens) == (10, 2)
    for path, answer in (("/v1/responses", {"output": [{"text": "x" * 300}]}), ("/v1/messages", {"content": [text]})):
        row = UsageRow(request_id="r")
        PassthroughUsage(path, row).whole(json.dumps({**answer, "usage": {"input_tokens": 10}}).encode())
        assert (row.prompt_tokens, row.completion_tokens) == (10, 100)
    said, spoken = "x" * 300, {"type": "duration", "seconds": 5}
    for body in (json.dumps({"text": said}), json.dumps({"text": said, "usage": spoken}), said, "{" + said[1:]):
        row = UsageRow(request_id="r")
        PassthroughUsage("/v1/audio/transcriptions", row).whole(body.encode())
        assert row.completion_tokens == 100, body
    called = {"type": "tool_use", "name": "f", "input": {"text": "x" * 289}}
    typed = {"type": "custom_tool_call", "name": "f", "input": "x" * 300}
    for path, answer in (("/v1/messages", {"content": [called]}), ("/v1/responses", {"output": [typed], "input": "y"})):
        row = UsageRow(request_id="r")
        PassthroughUsage(path, row).whole(json.dumps(answer).encode())
        assert row.completion_tokens == 100
    row = UsageRow(request_id="r")
    meter_whole(json.dumps({"data": [], "usage": part}).encode(), row, RequestSize())
    assert (row.prompt_tokens, row.completion_tokens) == (10, 0)


def message_event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}".encode()


@pytest.mark.parametrize("stream", [False, True])
def test_all_iterations_of_a_message_are_billed(stream: bool) -> None:
    """The outer counts leave out the iterations that compact the context."""
    cache = {"cache_creation_input_tokens": 6, "cache_creation": {"ephemeral_1h_input_tokens": 5}}
    steps = [
        {"type": "compaction", "input_tokens": 1000, "output_tokens": 50, "cache_read_input_tokens": 300, **cache},
        {"type": "message", "input_tokens": 20, "output_tokens": 7},
    ]
    usage, row = {"input_tokens": 20, "output_tokens": 7, "iterations": steps}, UsageRow(request_id="r")
    reader = PassthroughUsage("/v1/messages", row)
    if stream:
        reader.read(message_event("message_start", message={"usage": {"input_tokens": 20, "output_tokens": 1}}))
        reader.read(message_event("message_delta", delta={"stop_reason": "end_turn"}, usage=usage))
        reader.read(message_event("message_stop"))
    else:
        reader.whole(json.dumps({"content": [], "usage": usage}).encode())
    assert (row.prompt_tokens, row.completion_tokens, row.cached_tokens) == (1326, 57, 300)
    assert (row.stored_tokens, row.stored_1h_tokens) == (6, 5)


def test_cached_tokens_of_a_message_outlast_a_later_count_without_them() -> None:
    row, cache = UsageRow(request_id="r"), {"cache_read_input_tokens": 900, "cache_creation_input_tokens": 50}
    reader = PassthroughUsage("/v1/messages", row)
    reader.read(message_event("message_start", message={"usage": {"input_tokens": 3, "output_tokens": 1, **cache}}))
    reader.read(message_event("message_delta", delta={}, usage={"input_tokens": 4, "output_tokens": 7}))
    assert (row.prompt_tokens, row.cached_tokens, row.stored_tokens, row.completion_tokens) == (954, 900, 50, 7)
    reader.read(message_event("message_start", message={"usage": {"input_tokens": 3, "output_tokens": 1}}))
    assert (row.prompt_tokens, row.cached_tokens, row.stored_tokens) == (3, 0, 0)


@pytest.mark.parametrize("name", ["text", "thinking", "partial_json", "signature", "content", "future"])
def test_every_delta_of_a_message_without_usage_is_counted(name: str) -> None:
    row = UsageRow(request_id="r")
    reader = PassthroughUsage("/v1/messages", row)
    assert reader.read(message_event("message_start", message={})) is None
    for _ in range(20):
        assert reader.read(message_event("content_block_delta", index=0, delta={"type": "x", name: "x" * 400})) is None
    reader.settle()
    assert row.completion_tokens == 2000


def test_a_whole_message_in_a_stream_counts() -> None:
    chunk = json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": "x" * 400}}]})
    row, _ = metered([b"data: " + chunk.encode() + b"\n\n"], UsageOptions(), running=False)
    assert row.completion_tokens == 100


def test_an_image_of_a_delta_counts_a_fixed_number_of_tokens() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10**6}}
    chunk = json.dumps({"choices": [{"index": 0, "delta": {"images": [image]}}]})
    row, _ = metered([b"data: " + chunk.encode() + b"\n\n"], UsageOptions(), running=False)
    assert row.completion_tokens == 1500
