"""Check from the first text of a stream whether a cloud continues a begun answer or restarts it."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

from ...protocol.dialects.chat_chunks import text_of
from ...protocol.http.lenient_json import json_bytes
from ..request.json_narrowing import object_of, tables

Event = tuple[bytes, dict[str, Any]]
ContinuationVerdict = Literal["unknown", "continues", "repeats", "differs"]
_ALIKE = 12  # characters at the start of the answer; a stream that repeats them is rarely a continuation


class Continuation:
    """Check of a stream that should continue `begun`. Pass its events to `take()` while the result is "unknown".

    "repeats": the stream repeats all of `begun`; the events omit the repetition. "differs": the stream restarts like
    `begun` and then deviates. "continues" is also the result for a `begun` that is short or repeats its own start
    ("0, 0, 0, 0, "), since a genuine continuation may then look like a restart.
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
        text = "".join(text_of(object_of(choice.get("delta")).get("content")) for choice in choices)
        self._received = (self._received + text).lstrip()
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


def _with_text(event: dict[str, Any], text: str) -> Event:
    """Return `event` with `text` in its first choice and no text in the others."""
    choices = [
        {**choice, "delta": {**object_of(choice.get("delta")), "content": "" if at else text}}
        for at, choice in enumerate(tables(event["choices"]) or ())
    ]
    received = {**event, "choices": choices}
    return json_bytes(received), received
