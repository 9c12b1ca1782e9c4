"""Separation of reasoning, such as `<think>...</think>` at the beginning, from the answer."""

from __future__ import annotations

from dataclasses import dataclass

from ..detokenize import begun_mark

#: Marks before and after reasoning, by model family: most models, Gemma 4, Mistral.
_MARKS = (("<think>", "</think>"), ("<|channel>thought", "<channel|>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """Marks around a model's reasoning. `begun`: the prompt ends inside the reasoning, where the output continues."""

    begun: bool = False
    opener: str = _MARKS[0][0]
    closer: str = _MARKS[0][1]

    @staticmethod
    def of(source: str, prompt_end: str = "") -> ReasoningStyle | None:
        """Detect the marks in the source of a chat template or at the end of a prompt; None without reasoning."""
        for opener, closer in _MARKS:
            if any(mark in text for mark in (opener, closer) for text in (source, prompt_end)):
                return ReasoningStyle(prompt_end.rfind(opener) > prompt_end.rfind(closer), opener, closer)
        return None

    @property
    def tokens(self) -> tuple[str, str]:
        """Opener and closer, without the part that is no special token: `<|channel>` for `<|channel>thought`."""
        return self.opener.removesuffix("thought"), self.closer


class ReasoningBoundary:
    """Incremental search for the end of reasoning at the beginning of the output. Works for any split into pushes."""

    def __init__(self, style: ReasoningStyle | None) -> None:
        self._style = style  # None once the answer has begun
        self._thinking = style is not None and style.begun
        self._undecided, self._closed = True, False
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Return the text up to the end of the reasoning, with marks and whitespace, and the text of the answer."""
        style = self._style
        if style is None:
            return "", text
        text, self._held = self._held + text, ""
        if self._undecided:
            start = text.lstrip()
            if start != style.opener and style.opener.startswith(start):
                self._held = text
                return "", ""
            self._undecided, self._thinking = False, self._thinking or start.startswith(style.opener)
            if not self._thinking:
                self._style = None
                return "", text
        thoughts = mark = ""
        if not self._closed:
            thoughts, mark, text = text.partition(style.closer)
            if not mark:
                end = len(thoughts) - begun_mark(thoughts, (style.closer,))
                self._held = thoughts[end:]
                return thoughts[:end], ""
            self._closed = True
        answer = text.lstrip()
        self._style = None if answer else style
        return thoughts + mark + text[: len(text) - len(answer)], answer

    def flush(self) -> tuple[str, str]:
        """End the search: return the reasoning and the answer text that were held back."""
        held, self._held = self._held, ""
        return (held, "") if self._thinking else ("", held)


class ReasoningSplitter:
    """Incremental splitter of one output into reasoning, without marks and surrounding whitespace, and the answer."""

    def __init__(self, style: ReasoningStyle | None = None) -> None:
        self._style = style or ReasoningStyle()
        self._boundary = ReasoningBoundary(self._style)
        self._opened = self._shown = self._closed = False
        self._blanks = ""  # whitespace that ends the reasoning so far

    def push(self, text: str) -> tuple[str, str]:
        """Return new reasoning and new answer text, as far as they are certain."""
        thoughts, answer = self._boundary.push(text)
        return self._trimmed(thoughts), answer

    def flush(self) -> tuple[str, str]:
        """Return the remaining reasoning and answer text at the end of the output."""
        thoughts, answer = self._boundary.flush()
        return self._trimmed(thoughts) + self._blanks, answer

    def _trimmed(self, text: str) -> str:
        if not text or self._closed:
            return ""
        if not self._opened:
            self._opened, text = True, text.lstrip().removeprefix(self._style.opener)
        text, mark, _ = text.partition(self._style.closer)
        text = self._blanks + text if self._shown else text.lstrip()
        shown = text.rstrip()
        self._shown, self._closed = self._shown or bool(shown), bool(mark)
        self._blanks = "" if mark else text[len(shown) :]
        return shown
