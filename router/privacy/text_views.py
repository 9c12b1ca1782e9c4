"""The ways to read a text: as it is written, and as it looks. Each in bounded work."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator
from typing import Any, Literal

from ...protocol.unicode_forms import normalized
from ..request.json_narrowing import rows, table, tables
from .escapes import ReadingBudget

_LARGE = 10**40  # numbers from here on are nobody's
# Normal forms are made piece by piece: some characters grow 18-fold, and one call holds up every thread.
_PIECE = re.compile(r".{1,16384}[^\x00-\x7f]{0,64}", re.DOTALL)
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
    """Every string and number in some JSON, names included; what a message says in several parts also in one piece.

    Anything else is an empty text, so that who counts texts counts the work.
    """
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, int | float):
            yield repr(value) if abs(value) < _LARGE else ""
        elif (entries := table(value)) is not None:
            if parts := tables(entries.get("content")):
                yield "".join(map(text_of_part, parts))
            yield from entries
            waiting.extend(entries.values())
        else:
            yield ""
            waiting.extend(rows(value) or ())


def text_of_part(part: dict[str, Any]) -> str:
    """The text of a content part."""
    text_found = part.get("text", part.get("refusal"))
    return text_found if isinstance(text_found, str) else ""


def written_and_visible(text: str, budget: ReadingBudget) -> Collection[str]:
    """`text` as it is written, with letters and their accents apart, and as it is seen."""
    if text.isascii():
        return dict.fromkeys((text, plain(text)))
    whole = text.encode("utf-8", "replace").decode()  # half a character is none
    return dict.fromkeys((whole, _normal("NFD", whole, budget), *visible(whole, budget)))


def visible(text: str, budget: ReadingBudget) -> Collection[str]:
    """`text` as what it looks like, and in the plain way."""
    found = written(text, budget)
    return dict.fromkeys((found, plain(found)))


def written(text: str, budget: ReadingBudget) -> str:
    """Full-width digits and odd blanks as what they look like; half a character is none."""
    return _normal("NFKC", text, budget).encode("utf-8", "replace").decode()


def plain(text: str) -> str:
    """`text` without invisible characters, with one kind of dash and one kind of digit."""
    looks = {ord(each): look for each in set(text) if (look := _look(each)) != each}
    return "".join(piece[0].translate(looks) for piece in _PIECE.finditer(text)) if looks else text


def _normal(form: Literal["NFD", "NFKC"], text: str, budget: ReadingBudget) -> str:
    """`text` in a normal form; what it grows by is read too."""
    if text.isascii():
        return text
    pieces: list[str] = []
    for piece in _PIECE.finditer(text):
        pieces.append(normalized(form, piece[0]))
        budget.spend(max(0, len(pieces[-1]) - len(piece[0])))
    return "".join(pieces)


def _look(character: str) -> str | None:
    """The plain form of `character`; None for what nobody sees, and for what only surrounds another."""
    if (look := _LOOKS_LIKE.get(character)) is not None:
        return look
    kind = unicodedata.category(character)
    if kind in ("Cc", "Cf", "Me") or _IGNORABLE.match(character):
        return None
    if kind == "Pd" or character == "\u2212":  # the last is the sign for minus
        return "-"
    return str(unicodedata.decimal(character)) if kind == "Nd" else character
