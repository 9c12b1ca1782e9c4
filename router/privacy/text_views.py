"""The ways to read a text: as it is written, as it looks, and as what its escapes stand for."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator
from typing import Any

from ...protocol.unicode_forms import normalized
from ..request.json_narrowing import parsed, rows, table, tables

_LARGE = 10**40  # numbers from here on are nobody's
# Escapes of JSON and of what is like it, also where a text was escaped several times; of URLs; of HTML.
_ESCAPE = re.compile(
    r"(?<!\\)\\++(?:u([0-9a-f]{4})|x([0-9a-f]{2})|([nrt\"'/]))|%([0-9a-f]{2})|&#(?:x([0-9a-f]{1,6})|([0-9]{1,7}));",
    re.ASCII | re.IGNORECASE,
)
_MEANT = {"n": "\n", "r": "\r", "t": "\t"}
_JSON = re.compile(r'\s*+["[{]')
# Unicode's Default_Ignorable_Code_Point: what shows nothing by itself, variation selectors and fillers among it.
_IGNORABLE = re.compile(
    r"[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f"
    r"\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
# Characters that look like a plain one although Unicode does not say so: line ends, Braille's blank, China's full stop.
_LOOKS_LIKE = {"\t": "\t", "\n": "\n", "\r": "\r", "\u2800": " ", "\u3002": "."} | dict.fromkeys(
    "\v\f\x85\u2028\u2029", "\n"
)


def strings(value: Any) -> Iterator[str]:
    """Every string and number in some JSON, names included; what a message says in several parts also in one piece."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, int | float):
            yield repr(value) if abs(value) < _LARGE else ""
        elif (entries := table(value)) is not None:
            if parts := tables(entries.get("content")):
                yield "".join(part["text"] for part in parts if isinstance(part.get("text"), str))
            yield from entries
            waiting.extend(entries.values())
        else:
            waiting.extend(rows(value) or ())


def meanings(text: str) -> Iterator[str]:
    """`text`; what its escapes stand for; and if it is JSON what that says, where a string may be JSON again."""
    waiting = [text]
    while waiting:
        text = waiting.pop()
        yield text
        if (meant := unescaped(text)) != text:
            yield meant
        if _JSON.match(text):
            try:
                said = parsed(text.encode("utf-8", "replace"))
            except ValueError:  # then it is only text
                continue
            waiting.extend(strings(said))


def unescaped(text: str) -> str:
    """`text` with characters in place of their escapes."""
    meant = _ESCAPE.sub(_character, text)
    if meant == text:
        return text
    return meant.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")  # two halves make one


def _character(found: re.Match[str]) -> str:
    if (letter := found[3]) is not None:
        return _MEANT.get(letter.lower(), letter)
    code = int(found[6]) if found[6] else int(found[1] or found[2] or found[4] or found[5], 16)
    return chr(code) if code < 0x110000 else found[0]


def written_and_seen(text: str) -> Collection[str]:
    """`text` as it is written, with letters and their accents apart, and as it is seen."""
    if text.isascii():
        return dict.fromkeys((text, plain(text)))
    whole = text.encode("utf-8", "replace").decode()  # half a character is none
    return dict.fromkeys((whole, normalized("NFD", whole), *seen(whole)))


def seen(text: str) -> Collection[str]:
    """`text` as what it looks like, and in the plain way."""
    found = written(text)
    return dict.fromkeys((found, plain(found)))


def written(text: str) -> str:
    """Full-width digits and odd blanks as what they look like; half a character is none."""
    return normalized("NFKC", text).encode("utf-8", "replace").decode()


def plain(text: str) -> str:
    """What nobody sees goes, every dash is one, and so is every digit."""
    looks = {ord(each): look for each in set(text) if (look := _look(each)) != each}
    return text.translate(looks) if looks else text


def _look(character: str) -> str | None:
    """What `character` looks like; None for what nobody sees, and for what only surrounds another."""
    if (look := _LOOKS_LIKE.get(character)) is not None:
        return look
    kind = unicodedata.category(character)
    if kind in ("Cc", "Cf", "Me") or _IGNORABLE.match(character):
        return None
    if kind == "Pd" or character == "\u2212":  # the last is the sign for minus
        return "-"
    return str(unicodedata.decimal(character)) if kind == "Nd" else character
