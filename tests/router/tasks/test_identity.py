"""Shapes of tasks: what splits a task, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.router.tasks.identity import TaskShapes, without_names

PROMPT = "You sort letters of customers. Answer with one word: complaint, praise or other."
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def shape(system: str | None = PROMPT, user: str = "hello", model: str = "auto", **fields: Any) -> str:
    messages = [] if system is None else [{"role": "system", "content": system}]
    return TaskShapes().of({"messages": [*messages, {"role": "user", "content": user}], **fields}, model).text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Today is 3 May 2026. You help Anna.", "Today is Monday, 14 June 2027. You help Bartholomew."),
        ("You write for Ada Lovelace of Example Ltd in Bonn.", "You write for Bob of Another Company in Rome."),
        ("Session 8f2e-11. Be short.", "Session 77aa-29. Be short."),
        ("Reply to ada@example.org about order 17.", "Reply to bob@example.com about order 1,204."),
        ("Be  short.\nNever  guess.", "Be short. Never guess."),
    ],
)
def test_dates_names_and_numbers_split_no_task(one: str, other: str) -> None:
    assert shape(one) == shape(other)


@pytest.mark.parametrize(
    "other",
    [
        shape(PROMPT.replace("letters", "mails")),
        shape(PROMPT + " Answer as JSON."),
        shape(None),
        shape(model="local"),
        shape(tools=[TOOL]),
        shape(response_format={"type": "json_object"}),
    ],
)
def test_other_prompts_tools_formats_and_models_are_other_tasks(other: str) -> None:
    assert shape() != other


def test_the_users_text_does_not_matter() -> None:
    assert shape(user="a complaint") == shape(user="Praise! " * 1000)


def test_a_developer_message_and_parts_are_a_system_prompt() -> None:
    parts = [{"role": "developer", "content": [{"type": "text", "text": PROMPT}]}, {"role": "user", "content": "x"}]
    assert TaskShapes().of({"messages": parts}, "auto").text == shape()


@pytest.mark.parametrize(
    ("fields", "header", "name"),
    [
        ({"metadata": {"task": "letters"}}, "", "letters"),
        ({}, " letters ", "letters"),
        ({"metadata": {"task": "let\x1bters\nof  all"}}, "", "letters of all"),
        ({"metadata": {"task": "mails"}}, "letters", "letters"),
        ({"metadata": {"task": 7}}, "", ""),
        ({"metadata": "task"}, "", ""),
    ],
)
def test_the_caller_names_a_task(fields: dict[str, Any], header: str, name: str) -> None:
    one = TaskShapes().of({"messages": [{"role": "system", "content": "a"}], **fields}, "auto", header)
    other = TaskShapes().of({"messages": [{"role": "system", "content": "b"}], **fields}, "cloud", header)
    assert one.name == name
    assert (one.text == other.text) == bool(name)


@given(st.text(), st.text())
def test_every_text_has_a_shape(text: str, user: str) -> None:
    assert shape(text, user) == shape(text)
    usual = without_names(text)
    assert len(usual) <= len(text) + 1
