"""A stream's reader at every transition of the cascade."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from cascade_bench import run, text_of, updraft_of
from router_fakes import CLOUD_TEXT, LOCAL_TEXT, FakeCloud, ScriptedGates
from updraft.protocol.errors import EngineError

pytestmark = pytest.mark.usefixtures("short_waits")

# Streams


def test_a_held_stream_is_the_judged_local_answer(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench() as b:
            response, events, done = await b.stream(stream_options={"include_usage": True}, logprobs=True)
            assert done
            assert b.local.finished == 1
            assert text_of(events) == LOCAL_TEXT
            assert events[0]["choices"][0]["delta"]["role"] == "assistant"
            assert events[1]["choices"][0]["logprobs"]["content"][0]["token"] == "<0>"
            assert events[-2]["choices"][0]["finish_reason"] == "stop"
            assert updraft_of(events)["gate"] == 3
            assert events[-1]["usage"]["completion_tokens"] == 6
            assert len({event["id"] for event in events}) == 1
            assert response.headers["x-updraft-route"] == "local"
            assert "x-updraft-cost-usd" not in response.headers
            _, events, _ = await b.stream()
            assert all("usage" not in event for event in events)

    run(test())


def test_an_escalated_stream_is_relayed(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(after=True)) as b:
            response, events, done = await b.stream()
            assert done
            assert text_of(events) == CLOUD_TEXT
            assert events[0]["id"] == "cloud-1"
            info = updraft_of(events)
            assert (info["route"], info["cloud_tokens"], info["draft_accepted"]) == ("escalated", 4, 2)
            assert all(event["choices"] for event in events), "nobody asked for the usage chunk"
            assert response.headers["x-updraft-route"] == "escalated"
            _, events, _ = await b.stream(stream_options={"include_usage": True})
            assert events[-1]["usage"]["completion_tokens"] == 4
        assert cloud.requests[0]["prediction"]["content"] == LOCAL_TEXT

    run(test())


def test_an_event_of_several_lines_is_relayed_as_one(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        pieces = [
            b'data: {"choices":\ndata: [{"index": 0, "delta": {"content": "Hi"}}]}\n\n',
            b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n',
            b'data: {"choices": [],\r\ndata: "usage": {"prompt_tokens": 3, "completion_tokens": 1}}\r\n\r\n',
            b"data: [DONE]\n\n",
        ]
        cloud.says = (200, *pieces)
        async with bench() as b:
            response = await b.ask("cloud", stream=True, stream_options={"include_usage": True})
            lines = b"".join([chunk async for chunk in response.body]).splitlines()
        payloads = [line.removeprefix(b"data: ") for line in lines if line]
        assert payloads.pop() == b"[DONE]"
        events = [json.loads(payload) for payload in payloads]
        assert text_of(events) == "Hi"
        assert events[-1]["usage"]["completion_tokens"] == 1

    run(test())


def test_a_cloud_stream_cut_in_the_middle_ends_in_a_typed_error(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        cloud.mode = "cut"
        async with bench(ScriptedGates(before=True)) as b:
            _, events, done = await b.stream()
            assert not done
            assert text_of(events[:-1]) == "The cloud"
            assert events[-1]["error"]["type"] == "upstream_error"
        (row,) = b.rows()
        assert row.status == 502

    run(test())


def test_hold_tokens_streams_before_the_answer_is_whole(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(after=True), hold_tokens=3) as b:
            response = await b.ask(stream=True)
            assert b.local.finished == 0
            body = b"".join([chunk async for chunk in response.body])
            assert b"it was already streamed" in body
        assert not cloud.requests, "gate 3 cannot call streamed text back"
        assert b.rows()[0].gate == 3

    run(test())


def test_gate_2_decides_before_anything_is_streamed(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(during_at=2)) as b:
            _, events, _ = await b.stream(updraft={"hold_tokens": 4})
            assert text_of(events) == CLOUD_TEXT
        assert cloud.requests[0]["prediction"]["content"] == "one two"

    run(test())


def test_a_collapse_hands_the_streamed_text_over(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(during_at=4), hold_tokens=2) as b:
            _, events, done = await b.stream(max_tokens=50, stream_options={"include_usage": True})
            assert done
            assert text_of(events) == "one two three four and the cloud goes on."
            assert len({event["id"] for event in events}) == 1
            info = updraft_of(events)
            assert (info["route"], info["gate"], info["local_tokens"]) == ("escalated", 2, 4)
            assert events[-1]["usage"]["completion_tokens"] == 4 + 6
        (sent,) = cloud.requests
        assert sent["messages"][-1]["role"] == "assistant"
        assert sent["messages"][-1]["content"] == "one two three four"
        assert sent["continue_final_message"] is True
        assert sent["add_generation_prompt"] is False
        assert sent["max_tokens"] == 46
        assert "prediction" not in sent

    run(test())


def saying(*words: str) -> tuple[int, *tuple[bytes, ...]]:
    """A cloud that streams these words, whatever text it should continue."""
    deltas = [
        ({"role": "assistant", "content": ""}, None),
        *(({"content": word}, None) for word in words),
        ({}, "stop"),
    ]
    chunks = ({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]} for delta, reason in deltas)
    return 200, *(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks), b"data: [DONE]\n\n"


SHOWN = "one two three four"


@pytest.mark.parametrize(
    ("words", "text", "route", "goes_on"),
    [
        ((SHOWN, " cloud"), f"{SHOWN} cloud", "escalated", False),
        (("\n\n", "one two", " three four cl", "oud"), f"{SHOWN} cloud", "escalated", False),
        ((SHOWN,), SHOWN, "escalated", False),
        (("one two", " three cloud", "s"), LOCAL_TEXT, "fallback", False),
        (("one two three",), LOCAL_TEXT, "fallback", False),
        ((" one", " two", " of a kind"), f"{SHOWN} one two of a kind", "escalated", True),
        ((" one",), f"{SHOWN} one", "escalated", True),
        (("",), SHOWN, "escalated", True),
        ((" five",), f"{SHOWN} five", "escalated", True),
    ],
)
def test_streamed_text_is_never_repeated(
    bench: Any, cloud: FakeCloud, words: tuple[str, ...], text: str, route: str, goes_on: bool
) -> None:
    async def test() -> None:
        cloud.says = saying(*words)
        async with bench(ScriptedGates(during_at=4, after=True), hold_tokens=2) as b:
            _, events, done = await b.stream()
            assert (text_of(events), updraft_of(events)["route"], done) == (text, route, True)
            assert ("restarted the answer" in updraft_of(events)["reason"]) == (route == "fallback")
            cloud.says = None
            _, events, _ = await b.stream()
            after = f"{SHOWN} and the cloud goes on." if goes_on else CLOUD_TEXT
            assert text_of(events) == after, "who began anew is handed no stream any more"

    run(test())


def test_a_cloud_that_is_not_said_to_continue_is_handed_no_stream(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(during_at=4, after=True), hold_tokens=2, cloud_continues=False) as b:
            _, events, _ = await b.stream()
            assert text_of(events) == CLOUD_TEXT
            _, events, _ = await b.stream(updraft={"hold_tokens": 1})
            assert text_of(events) == CLOUD_TEXT
            _, events, _ = await b.stream("local")
            assert text_of(events) == LOCAL_TEXT, "where nothing can go up a stream has nothing to wait for"
        assert not any("continue_final_message" in sent for sent in cloud.requests)

    run(test())


def test_hand_over_to_a_dead_cloud_continues_locally(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        cloud.mode = "500"
        async with bench(ScriptedGates(during_at=4), hold_tokens=2) as b:
            _, events, done = await b.stream(max_tokens=5)
            assert done
            assert text_of(events) == "one two three four five", "max_tokens holds over both local runs"
            assert updraft_of(events)["route"] == "fallback"
            messages, params, continues = b.local.calls[-1]
            assert (messages[-1].text, params.max_tokens, continues) == ("one two three four", 1, True)

    run(test())


def test_an_answer_that_has_used_up_its_limit_is_not_handed_over(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(during_at=4), hold_tokens=2) as b:
            _, events, done = await b.stream(max_tokens=4, stream_options={"include_usage": True})
            assert done
            assert text_of(events) == "one two three four"
            assert [e["choices"][0]["finish_reason"] for e in events if e["choices"]][-1] == "length"
            assert (updraft_of(events)["route"], events[-1]["usage"]["completion_tokens"]) == ("local", 4)
            start = b.local.start
            b.local.start = lambda messages, params, **more: start(messages, replace(params, max_tokens=None), **more)
            b.local.fails_at, b.local.error = 3, EngineError("llama failed")
            _, events, done = await b.stream(max_tokens=3)
            assert (text_of(events), done) == ("one two three", True), "it failed where it would have ended"
            assert (updraft_of(events)["route"], "max_tokens" in updraft_of(events)["reason"]) == ("local", True)
        assert not cloud.requests

    run(test())


def test_a_hand_over_keeps_both_limits(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(during_at=4), hold_tokens=2) as b:
            limits = {"max_tokens": 90, "max_completion_tokens": 6, "min_tokens": 6}
            await b.stream(**limits)
            cloud.mode = "500"
            _, events, done = await b.stream(**limits)
            assert (text_of(events), done) == (LOCAL_TEXT, True)
        sent = cloud.requests[0]
        assert [sent[name] for name in limits] == [2, 2, 2]

    run(test())


def test_a_cut_after_the_hand_over_is_a_typed_error(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        cloud.mode = "cut"
        async with bench(ScriptedGates(during_at=4), hold_tokens=2) as b:
            _, events, done = await b.stream()
            assert not done
            assert events[-1]["error"]["type"] == "upstream_error"

    run(test())


def test_forced_local_streams_at_once(bench: Any) -> None:
    async def test() -> None:
        async with bench() as b:
            response = await b.ask("local", stream=True)
            assert b.local.finished == 0
            body = b"".join([chunk async for chunk in response.body])
            assert body.endswith(b"data: [DONE]\n\n")

    run(test())


def test_a_local_model_failing_in_the_middle_of_a_stream_is_a_typed_error(bench: Any) -> None:
    async def test() -> None:
        async with bench() as b:
            b.local.fails_at, b.local.error = 3, EngineError("llama failed")
            _, events, done = await b.stream("local")
            assert not done
            assert events[-1]["error"]["type"] == "engine_error"
        assert b.rows()[0].status == 500

    run(test())


def test_a_local_model_failing_after_text_was_streamed_hands_over(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(hold_tokens=2) as b:
            b.local.fails_at, b.local.error = 3, EngineError("llama failed")
            _, events, done = await b.stream()
            assert done
            assert text_of(events) == "one two three and the cloud goes on."
            assert "the local model failed" in updraft_of(events)["reason"]

    run(test())
