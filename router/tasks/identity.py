"""The task of a request: its system prompt, tools, response format and model, whatever the user's text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ...protocol.http.lenient_json import object_of, tables
from ...protocol.safety.bounded_cache import BoundedCache

MAX_NAME_CHARS = 100
_FORMATS = ("response_format", "structured_outputs", "json_schema", "grammar", "tool_choice")
_DIGITS = re.compile(r"\d+")
_CALENDAR = frozenset(
    (
        *("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
        *("january", "february", "march", "april", "june", "july", "august", "september", "october", "november"),
        "december",
    )
)
_SENTENCE_ENDS = (".", "!", "?", ":", ";")
_QUOTES = "\"'”’)]"
# Two of these words tell that a text is German, in which every noun is capitalised.
_GERMAN = frozenset(
    ("aus", "auf", "das", "dem", "den", "der", "die", "ein", "eine", "für", "ist", "mit", "nicht", "und")
)
_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class TaskShape:
    """The common part of all requests of a task."""

    # Name that the caller gave, or an empty string.
    name: str
    # Text that is equal for all requests of the task.
    text: str
    # Beginning of the system prompt, or of the first tool's name, to show to the user.
    title: str = ""


class TaskShapes:
    """Reader of shapes. Remembers long prompts, because agents send the same one with each request."""

    def __init__(self) -> None:
        self._kept: BoundedCache[bytes, bytes] = BoundedCache(_REMEMBERED)

    def of(self, body: Mapping[str, Any], model: str, caller: str = "", header: str = "") -> TaskShape | None:
        """Return the shape of a chat request; None if nothing tells its task: no name, system prompt, tools or format.
        `model`: name that the caller gave; `caller`: digest of the API key, since callers share no tasks; `header`:
        value of `x-updraft-task`.

        Numbers, dates and names inside a system prompt do not matter, so that "Today is 3 May, you help Anna" remains
        one task. Names are capitalised words inside a sentence.
        """
        given: Any = header or object_of(body.get("metadata")).get("task")
        name = printable_name(given)[:MAX_NAME_CHARS] if isinstance(given, str) else ""
        if name:
            return TaskShape(name, "\0".join(("name", caller, name)))
        prompt = "\n".join(_system_texts(body))
        tools = tables(body.get("tools")) or []
        formats = [body.get(field) for field in _FORMATS]
        if not (prompt.strip() or tools or any(formats)):
            return None
        called = [str(object_of(tool.get("function")).get("name", "")) for tool in tools]
        title = " ".join(prompt.split()) or ", ".join(called)
        key = _digest(prompt)
        usual = self._kept.find(key, lambda _: _digest(without_names(prompt)))
        encoded = msgspec.json.encode([tools, formats], order="deterministic").decode("utf-8", "replace")
        text = "\0".join(("shape", caller, model, usual.hex(), encoded))
        return TaskShape("", text, printable_name(title[: 2 * MAX_NAME_CHARS])[:MAX_NAME_CHARS])


def without_names(text: str) -> str:
    """Return `text` with one mark in place of successive numbers, dates and names, and without the white space."""
    words: list[tuple[str, bool]] = []  # with whether each begins a sentence
    for line in text.splitlines():
        begins = True
        for word in line.split():
            words.append((word, begins))
            begins = word.rstrip(_QUOTES).endswith(_SENTENCE_ENDS) or not any(map(str.isalnum, word))
    inner = [bare for word, begins in words if not begins and (bare := _bare(word))]
    names = set(filter(_is_name, inner))
    if len(_GERMAN.intersection(inner)) > 1:
        names.clear()
    kept: list[str] = []
    for word, _ in words:
        bare = _bare(word)
        varies = bare in names or bare.lower() in _CALENDAR or _is_identifier(word)
        plain = "#" if varies else _DIGITS.sub("#", word)
        if plain.strip("#.,:/-") or not plain.startswith("#"):
            kept.append(plain)
        elif not kept or kept[-1] != "#":
            kept.append("#")
    return " ".join(kept)


def _bare(word: str) -> str:
    """Return `word` without its outer punctuation."""
    return word.strip("".join({each for each in word if not each.isalnum()}))


def _is_identifier(word: str) -> bool:
    """Return whether a word is an address or has digits, in a script that separates words."""
    return word.isascii() and ("@" in word or "://" in word or any(map(str.isdigit, word)))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def printable_name(text: str) -> str:
    """Return `text` on one line without control characters, because names appear in logs and on terminals."""
    return "".join(filter(str.isprintable, " ".join(text.split())))


def _is_name(word: str) -> bool:
    """Return whether a word inside a sentence is a name. Words in capitals, such as JSON, are no names."""
    return len(word) > 1 and word[0].isupper() and not word.isupper() and word != "I'm"


def _system_texts(body: Mapping[str, Any]) -> Iterable[str]:
    for message in tables(body.get("messages")) or []:
        if message.get("role") not in ("system", "developer"):
            continue
        content = message.get("content")
        if isinstance(content, str):
            yield content
        for part in tables(content) or []:
            if isinstance(part.get("text"), str):
                yield part["text"]
