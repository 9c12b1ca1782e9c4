"""Converter of a cloud's `<think>` text to the field `reasoning_content` (setting `cloud_reasoning_tags`)."""

from __future__ import annotations

from typing import Any

from ...text.templates.reasoning import ReasoningSplitter
from ..request.json_narrowing import table, tables


def whole(completion: dict[str, Any]) -> dict[str, Any]:
    choices = tables(completion.get("choices")) or []
    return {**completion, "choices": [{**each, "message": _message(table(each.get("message")))} for each in choices]}


class CloudReasoning:
    """Converter of reasoning in one stream's events. Reasoning already in `reasoning_content` stays unchanged."""

    def __init__(self) -> None:
        self._splitters: dict[Any, ReasoningSplitter] = {}

    def event(self, event: dict[str, Any]) -> dict[str, Any]:
        return {**event, "choices": [self._choice(each) for each in tables(event.get("choices")) or []]}

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        delta = table(choice.get("delta")) or {}
        text = delta.get("content")
        splitter = self._splitters.setdefault(choice.get("index"), ReasoningSplitter())
        thoughts, shown = splitter.push(text) if isinstance(text, str) else ("", "")
        if choice.get("finish_reason"):
            rest = splitter.flush()
            thoughts, shown = thoughts + rest[0], shown + rest[1]
        said = {"content": shown} if shown or isinstance(text, str) else {}
        thought = {"reasoning_content": thoughts} if thoughts else {}
        return {**choice, "delta": {**delta, **said, **thought}}


def _message(message: dict[str, Any] | None) -> dict[str, Any]:
    message = message or {}
    text = message.get("content")
    if not isinstance(text, str):
        return message
    splitter = ReasoningSplitter()
    parts = [splitter.push(text), splitter.flush()]
    thoughts, shown = ("".join(each) for each in zip(*parts, strict=True))
    return {**message, "content": shown} | ({"reasoning_content": thoughts} if thoughts else {})
