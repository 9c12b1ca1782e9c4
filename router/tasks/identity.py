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
# A word with its outer punctuation. Numbers, addresses and identifiers have a digit, `@` or `://`.
_WORD = re.compile(r"\s*\S+")
_VARYING = re.compile(r"\d|@|://")
_CALENDAR = frozenset(
    (
        *("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
        *("january", "february", "march", "april", "june", "july", "august", "september", "october", "november"),
        "december",
    )
)
_OUTER = re.compile(r"\A\W+|\W+\Z")
_ENDS_SENTENCE = re.compile(r"[.!?:;][\"'”’)\]]*\Z|\A[-*#>|]+\Z|\A\d+[.)]\Z")
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
        self._kept: BoundedCache[bytes, str] = BoundedCache(_REMEMBERED)

    def of(self, body: Mapping[str, Any], model: str, header: str = "") -> TaskShape:
        """Return the shape of a chat request. `model`: name that the caller gave; `header`: value of `x-updraft-task`.

        Numbers, dates and names inside a system prompt do not matter, so that "Today is 3 May, you help Anna" remains
        one task. Names are capitalised words inside a sentence.
        """
        given: Any = header or object_of(body.get("metadata")).get("task")
        name = _printable(given)[:MAX_NAME_CHARS] if isinstance(given, str) else ""
        if name:
            return TaskShape(name, f"name\0{name}")
        prompt = "\n".join(_system_texts(body))
        tools = tables(body.get("tools")) or []
        fixed = [tools, [body.get(field) for field in _FORMATS]]
        called = [str(object_of(tool.get("function")).get("name", "")) for tool in tools]
        title = " ".join(prompt.split()) or ", ".join(called)
        key = hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        usual = self._kept.find(key, lambda _: without_names(prompt))
        encoded = msgspec.json.encode(fixed, order="deterministic").decode("utf-8", "replace")
        return TaskShape("", "\0".join(("shape", model, usual, encoded)), _printable(title)[:MAX_NAME_CHARS])


def without_names(text: str) -> str:
    """Return `text` with one mark in place of successive numbers, dates and names, and without the white space."""
    words = [match[0] for match in _WORD.finditer(text)]
    bare = [_OUTER.sub("", word.strip()) for word in words]
    starts = ["\n" in word or at == 0 or bool(_ENDS_SENTENCE.search(words[at - 1])) for at, word in enumerate(words)]
    names = {word for word, begins in zip(bare, starts, strict=True) if not begins and _is_name(word)}
    kept: list[str] = []
    for word, core in zip(words, bare, strict=True):
        varies = _VARYING.search(word) is not None or core.lower() in _CALENDAR or core in names
        if not varies:
            kept.append(word.strip())
        elif not kept or kept[-1] != "#":
            kept.append("#")
    return " ".join(kept)


def _printable(text: str) -> str:
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
