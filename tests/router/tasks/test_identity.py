"""Shapes of tasks: what splits a task, and what does not."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.router.tasks.identity import TaskShapes, without_names

PROMPT = "You sort letters of customers. Answer with one word: complaint, praise or other."
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def shape(system: str | None = PROMPT, user: str = "hello", model: str = "auto", **fields: Any) -> str:
    messages = [] if system is None else [{"role": "system", "content": system}]
    return text_of({"messages": [*messages, {"role": "user", "content": user}], **fields}, model)


def text_of(body: dict[str, Any], model: str = "auto", *more: str) -> str:
    found = TaskShapes().of(body, model, *more)
    return "" if found is None else found.text


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
    assert text_of({"messages": parts}) == shape()


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
    one = TaskShapes().of({"messages": [{"role": "system", "content": "a"}], **fields}, "auto", "", header)
    other = text_of({"messages": [{"role": "system", "content": "b"}], **fields}, "cloud", "", header)
    assert one is not None and one.name == name
    assert (one.text == other) == bool(name)


def test_without_anything_to_tell_it_there_is_no_task() -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert TaskShapes().of({"messages": messages}, "auto") is None
    assert TaskShapes().of({"messages": [{"role": "system", "content": " "}, *messages]}, "auto") is None


def test_callers_share_no_task() -> None:
    for fields in ({}, {"metadata": {"task": "letters"}}):
        body = {"messages": [{"role": "system", "content": PROMPT}], **fields}
        assert text_of(body, "auto", "one") != text_of(body, "auto", "other") != ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "Antworte auf 3 Fragen: Nenne die Rechnungsnummer aus dem Text.",
            "Antworte auf 3 Fragen: Nenne die Lieferadresse aus dem Brief.",
        ),
        ("請用3句話回答問題", "請把3個詞翻譯成英文"),
        ("Name the invoice number.", "Name the delivery address."),
    ],
)
def test_other_words_split_a_task_in_every_language(one: str, other: str) -> None:
    assert shape(one) != shape(other)


@pytest.mark.parametrize(
    "text",
    ["a" + "-" * 200_000 + "b", " " * 200_000, "." * 100_000 + "'" * 100_000 + "a", "-" * 200_000, "1a" * 100_000],
)
def test_hostile_prompts_take_no_time(text: str) -> None:
    began = time.thread_time()
    without_names(text)
    assert time.thread_time() - began < 1


@given(st.text(), st.text())
def test_every_text_has_a_shape(text: str, user: str) -> None:
    assert shape(text, user) == shape(text)
    usual = without_names(text)
    assert len(usual) <= 2 * len(text) + 1
