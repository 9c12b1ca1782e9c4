"""Converter of a cloud's `<think>` text to the field `reasoning_content` (setting `cloud_reasoning_tags`)."""

from __future__ import annotations

from typing import Any

from ...text.templates.reasoning import ReasoningSplitter
from ..request.json_narrowing import object_of, tables


def whole(completion: dict[str, Any]) -> dict[str, Any]:
    """Convert the reasoning in a whole completion. Drops `deltas`, which would still hold the tags."""
    choices: list[dict[str, Any]] = []
    for choice in tables(completion.get("choices")) or []:
        message = {name: value for name, value in object_of(choice.get("message")).items() if name != "deltas"}
        choices.append({**choice, "message": _converted(message, ReasoningSplitter(), ended=True)})
    return {**completion, "choices": choices}


class CloudReasoning:
    """Converter of `<think>` text in one stream's events. Reasoning in `reasoning_content` stays unchanged."""

    def __init__(self) -> None:
        self._splitters: dict[Any, ReasoningSplitter] = {}

    def event(self, event: dict[str, Any]) -> dict[str, Any]:
        return {**event, "choices": [self._choice(each) for each in tables(event.get("choices")) or []]}

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        splitter = self._splitters.setdefault(choice.get("index"), ReasoningSplitter())
        delta = object_of(choice.get("delta"))
        return {**choice, "delta": _converted(delta, splitter, ended=bool(choice.get("finish_reason")))}


def _converted(said: dict[str, Any], splitter: ReasoningSplitter, *, ended: bool) -> dict[str, Any]:
    """Return a message or delta with its reasoning in `reasoning_content`. `ended`: no more text follows."""
    text = said.get("content")
    thoughts, shown = splitter.push(text) if isinstance(text, str) else ("", "")
    if ended:
        rest = splitter.flush()
        thoughts, shown = thoughts + rest[0], shown + rest[1]
    content = {"content": shown} if shown or isinstance(text, str) else {}
    return {**said, **content, **({"reasoning_content": thoughts} if thoughts else {})}
