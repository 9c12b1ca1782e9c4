"""Trimming of white space around user turns: it carries no meaning but may make a small model answer worse.

Both tiers get the trimmed turns, so that the graded, judged and answered prompt is the same. White space inside a turn
stays, as does the indentation of the first line if it may be code.
"""

from __future__ import annotations

import re
from typing import Any

from .json_narrowing import table, tables

_UNSEEN = "\u200b\u2060\ufeff"  # zero-width spaces
_BLANKS = f"\\s{_UNSEEN}"
_BLANK_LINES = re.compile(rf"\A(?:[{_BLANKS}]*[\r\n])?")
_INDENT = re.compile(rf"\A[{_BLANKS}]+")
_INDENTED_LINE = re.compile(r"[\r\n][ \t]+\S")
_END = re.compile(rf"(?<![{_BLANKS}])[{_BLANKS}]+\Z")  # tried once for each run of blanks
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)


def trim_user_turns(body: dict[str, Any]) -> None:
    """Trim the text of `body`'s user turns in a new list, because the old list may be shared."""
    messages = tables(body.get("messages"))
    if messages is not None:
        body["messages"] = [
            _trimmed_turn(message) if message.get("role") == "user" else message for message in messages
        ]


def trimmed(text: str) -> str:
    """Return `text` without leading blank lines, trailing white space, and indentation of the first line unless another
    line is indented too.

    Blank text stays unchanged, as does the end of a code block that is left open.
    """
    return _end_trimmed(_start_trimmed(text)) or text


def _trimmed_turn(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": trimmed(content)}
    parts = tables(content)
    if not parts:
        return message
    ends = ((0, _start_trimmed), (-1, _end_trimmed))
    parts = list(parts)
    for at, trim in ends:
        part = table(parts[at]) or {}
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            parts[at] = {**part, "text": trim(part["text"]) or part["text"]}
    return {**message, "content": parts}


def _start_trimmed(text: str) -> str:
    text = _BLANK_LINES.sub("", text)
    is_code = text.startswith((" ", "\t")) and _INDENTED_LINE.search(text)
    return text if is_code else _INDENT.sub("", text)


def _end_trimmed(text: str) -> str:
    return text if len(_FENCE.findall(text)) % 2 else _END.sub("", text)
