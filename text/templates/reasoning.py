"""Separation of reasoning (`<think>...</think>` at the beginning) from the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..detokenize import begun_mark

OPENER, CLOSER = "<think>", "</think>"
_BEGUN = re.compile(r"<think>(?:\\n)*['\"]\s*-?\}\}\s*(?:\{%-?\s*endif\s*-?%\}\s*)*\Z")


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """Reasoning style of a model. `begun`: the prompt ends with `<think>`, so the output starts inside of reasoning."""

    begun: bool = False

    @staticmethod
    def of(source: str) -> ReasoningStyle | None:
        """Detect the style in the source of a chat template; None for a model without reasoning."""
        if CLOSER not in source and OPENER not in source:
            return None
        return ReasoningStyle(begun=_BEGUN.search(source) is not None)


class ReasoningSplitter:
    """Incremental splitter for one answer; the joined results do not depend on how the text is split into pushes.

    `<think>` counts only at the beginning of the answer. Whitespace around the reasoning is dropped.
    """

    def __init__(self, style: ReasoningStyle | None = None) -> None:
        self._begun = style is not None and style.begun
        self._thinking = False
        self._answering = False
        self._trims = True  # whether to drop leading whitespace of the current part
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Return new reasoning and new answer text, as far as they are certain."""
        if self._answering and not self._trims:
            return "", text
        self._held += text
        if not self._answering and not self._thinking:
            begun = self._held.lstrip()
            if OPENER.startswith(begun) and begun != OPENER:
                return "", ""
            self._thinking = self._begun or begun.startswith(OPENER)
            if not self._thinking:
                self._answering, self._trims = True, False
                return "", self._taken(len(self._held))
            self._held = begun.removeprefix(OPENER)
        thoughts = self._think() if self._thinking else ""
        return thoughts, self._answer() if self._answering else ""

    def flush(self) -> tuple[str, str]:
        """Return the remaining reasoning and answer text at the end of the answer."""
        rest = self._taken(len(self._held))
        if self._answering:
            return "", ""  # only whitespace after the reasoning is left
        return (rest, "") if self._thinking or self._begun else ("", rest)

    def _think(self) -> str:
        if self._trims:
            self._held = self._held.lstrip()
            self._trims = not self._held
        thoughts, closed, rest = self._held.partition(CLOSER)
        if closed:
            self._thinking, self._answering, self._trims, self._held = False, True, True, rest
            return thoughts.rstrip()
        begun = begun_mark(self._held, (CLOSER,))
        return self._taken(len(self._held[: len(self._held) - begun].rstrip()))

    def _answer(self) -> str:
        self._held = self._held.lstrip()
        self._trims = not self._held
        return self._taken(len(self._held))

    def _taken(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken
