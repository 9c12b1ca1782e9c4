"""Thoughts come as `reasoning_content`: of the local model, and of a cloud that leaves them in its text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cascade_bench import run, text_of
from router_fakes import FakeCloud
from updraft.protocol.errors import EngineError
from updraft.text.templates.reasoning import ReasoningStyle

FORMAT = {"type": "json_object"}


def thoughts_of(events: list[dict[str, Any]]) -> str:
    deltas = [choice["delta"] for event in events for choice in event.get("choices", [])]
    return "".join(delta.get("reasoning_content") or "" for delta in deltas)


@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_of_the_local_model(bench: Any, begun: bool) -> None:
    async def test() -> None:
        async with bench() as b:
            b.local.reasoning = ReasoningStyle(begun)
            b.local.text = ("" if begun else "<think>\n") + "Let me see.\n</think>\n\nIt is 42."
            message = (await b.answer("local"))["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("Let me see.", "It is 42.")
            _, events, _ = await b.stream("local")
            assert (thoughts_of(events), text_of(events)) == ("Let me see.", "It is 42.")
            b.local.text = '{"a": 1}'
            message = (await b.answer("local", response_format=FORMAT))["choices"][0]["message"]
            assert message["content"] == '{"a": 1}', "an answer held to a format has no thoughts in it"

    run(test())


def test_the_thoughts_of_each_of_several_streamed_answers(bench: Any) -> None:
    async def test() -> None:
        async with bench() as b:
            b.local.reasoning = ReasoningStyle()
            b.local.text = "<think> Let me see. </think> It is 42."
            _, events, done = await b.stream("local", n=2)
            choices = [choice for event in events for choice in event["choices"]]
            assert done and [choice["index"] for choice in choices if choice["finish_reason"]] == [0, 1]
            for index in (0, 1):
                mine = [{"choices": [choice]} for choice in choices if choice["index"] == index]
                assert (thoughts_of(mine), text_of(mine)) == ("Let me see.", "It is 42.")
            b.local.text = "<think> Let me see."
            _, events, _ = await b.stream("local", n=2)
            assert (thoughts_of(events), text_of(events)) == ("Let me see." * 2, ""), "thoughts without an end"
            response = await b.ask("local", n=2, stream=True)
            b.local.error, b.local.fails_at = EngineError("It broke."), 2
            told = b"".join([chunk async for chunk in response.body])
            assert b"It broke." in told and b"[DONE]" not in told
            refused = await b.ask("local", n=2, stream=True)
            assert refused.status == 200
            b.local.fails_at = 0
            assert (await b.ask("local", n=2, stream=True)).status == 500
            await refused.body.aclose()
            assert b.local.running == 0

    run(test())


def test_reasoning_in_a_clouds_text(bench: Any, cloud: FakeCloud) -> None:
    text = "<think>Let me see.</think>\nIt is 42."
    message = {"role": "assistant", "content": text}
    whole = {"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    deltas = [*({"content": text[at : at + 5]} for at in range(0, len(text), 5)), {}]
    chunks = [{"choices": [{"index": 0, "delta": each, "finish_reason": None if each else "stop"}]} for each in deltas]

    async def test() -> None:
        for settings, shown in (({"cloud_reasoning_tags": True}, ("Let me see.", "It is 42.")), ({}, ("", text))):
            async with bench(**settings) as b:
                cloud.says = 200, json.dumps(whole).encode()
                message = (await b.answer("cloud"))["choices"][0]["message"]
                assert (message.get("reasoning_content", ""), message["content"]) == shown
                cloud.says = 200, *(f"data: {json.dumps(each)}\n\n".encode() for each in chunks), b"data: [DONE]\n\n"
                _, events, done = await b.stream("cloud")
                assert done
                assert (thoughts_of(events), text_of(events)) == shown

    run(test())
