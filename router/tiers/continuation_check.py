"""Whether a cloud goes on with an answer that others have begun, or begins it anew: by what it says first."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

from ...protocol.http.foreign import json_bytes
from ..request.json_narrowing import table, tables

Event = tuple[bytes, dict[str, Any]]
ContinuationVerdict = Literal["unknown", "continues", "repeats", "differs"]
_ALIKE = 12  # characters: an answer that goes on hardly ever says so many of its first ones again


class Continuation:
    """The first events of a stream that is to go on with `begun`. `take()` each until the verdict is known.

    "repeats": it says all of `begun` again, which is taken out of the events. "differs": it begins `begun` again, and
    then says something else. A short text, or one that says its own beginning again ("0, 0, 0, 0, "), tells nothing:
    what goes on with it may look the same.
    """

    def __init__(self, begun: str) -> None:
        self.events: deque[Event] = deque()
        self._begun = begun.lstrip()
        start = self._begun[:_ALIKE]
        self._is_distinctive = len(start) == _ALIKE and start not in self._begun[1:]
        self._received = ""

    def take(self, event: Event) -> ContinuationVerdict:
        choices = event[1]["choices"]
        self.events.append(event)
        self._received = (self._received + "".join(map(_text, choices))).lstrip()
        verdict = self._verdict(ended=any(choice.get("finish_reason") for choice in choices))
        if verdict == "repeats":
            self.events = deque([_with_text(event[1], self._received[len(self._begun) :])])
        return verdict

    def _verdict(self, *, ended: bool) -> ContinuationVerdict:
        received, begun = self._received, self._begun
        if not self._is_distinctive:
            return "continues"
        if received.startswith(begun):
            return "repeats"
        if begun.startswith(received) and not ended:
            return "unknown"
        return "differs" if received[:_ALIKE] == begun[:_ALIKE] else "continues"


def _text(choice: dict[str, Any]) -> str:
    content = (table(choice.get("delta")) or {}).get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in tables(content) or ())


def _with_text(event: dict[str, Any], text: str) -> Event:
    """`event` with `text` in its first piece, and none in others."""
    choices = [
        {**choice, "delta": {**(table(choice.get("delta")) or {}), "content": "" if at else text}}
        for at, choice in enumerate(tables(event["choices"]) or ())
    ]
    received = {**event, "choices": choices}
    return json_bytes(received), received
