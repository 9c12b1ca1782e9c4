"""Whitespace around a user's turn: the local model gets the turn without it, a cloud gets it unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cascade_bench import run
from router_fakes import FakeCloud
from updraft.router.request.chat_request import trimmed, with_trimmed_turns

CODE = "    for x in y:\n        print(x)\nWhat does it print?"


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("What is 2 + 2?\n", "What is 2 + 2?"),
        ("  What is 2 + 2? \r\n\r\n", "What is 2 + 2?"),
        ("\u00a0What is 2 + 2?\u3000\u200b\n", "What is 2 + 2?"),
        ("\ufeffWhat?\n\nAnd  why?\t", "What?\n\nAnd  why?"),
        (f"\n \n{CODE}\n", CODE),  # its first line keeps the indentation that the next ones count from
        ("Go on:\n```python\nx = [\n    ", "Go on:\n```python\nx = [\n    "),  # an open block may end in code
        ("Fix:\n```\nx\n```\n\n", "Fix:\n```\nx\n```"),
        (" \n", " \n"),
        ("", ""),
    ],
)
def test_blanks_around_a_turn_are_removed(text: str, sent: str) -> None:
    assert trimmed(text) == sent


def test_blanks_without_end_take_no_time() -> None:
    assert trimmed("a" + " \n" * 200_000 + "b" + "\n " * 200_000).endswith("b")


def test_other_turns_and_parts_stay_as_they_are() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief.\n"},
        {
            "role": "user",
            "content": [{"type": "text", "text": " What\n"}, image, {"type": "text", "text": "this is?\n"}],
        },
        {"role": "assistant", "content": "A cat.\n"},
        {"role": "tool", "content": "1\n", "tool_call_id": "x"},
        {"role": "user", "content": None},
    ]
    was = json.dumps(messages)
    body = with_trimmed_turns({"messages": messages})
    assert json.dumps(messages) == was
    parts = body["messages"][1]["content"]
    assert parts == [{"type": "text", "text": "What\n"}, image, {"type": "text", "text": "this is?"}]
    assert [body["messages"][i] for i in (0, 2, 3, 4)] == [messages[i] for i in (0, 2, 3, 4)]


def test_only_the_local_model_gets_the_trimmed_turn(bench: Any, cloud: FakeCloud) -> None:
    parts = [{"type": "text", "text": "    return x\n\n"}, {"type": "text", "text": "\u3000Why?\t\n"}]
    messages = [{"role": "user", "content": "    How many?\n\n"}, {"role": "user", "content": parts}]

    async def test() -> None:
        async with bench() as b:
            await b.answer("local", messages=messages[:1])
            await b.answer("cloud", messages=messages)
            assert [message.text for message in b.local.calls[-1][0]] == ["How many?"]
            assert cloud.requests[-1]["messages"] == messages

    run(test())
