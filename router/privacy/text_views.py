"""Views of a text for the privacy rules: as written, and as it looks. The work for each view is bounded."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator
from typing import Any, Literal

from ...protocol.unicode_forms import normalized
from ..request.json_narrowing import rows, table, tables
from .escapes import ReadingBudget

_LARGE = 10**40  # larger numbers cannot be personal data
# A piece of a text for normalization, which blocks all threads during a call and lengthens some characters 18-fold.
_PIECE = re.compile(r".{1,16384}[^\x00-\x7f]{0,64}", re.DOTALL)
# Unicode's Default_Ignorable_Code_Point: invisible characters, including variation selectors and fillers.
_IGNORABLE = re.compile(
    r"[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f"
    r"\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
# Plain characters for lookalikes that Unicode does not list: line ends, Braille's blank, the Chinese full stop.
_LOOKS_LIKE = {"\t": "\t", "\n": "\n", "\r": "\r", "\u2800": " ", "\u3002": "."} | dict.fromkeys(
    "\v\f\x85\u2028\u2029", "\n"
)


def strings(value: Any) -> Iterator[str]:
    """Yield every string and number in a JSON value, including field names, and the joined text of multi-part contents.
    Other values yield an empty text, so that the number of texts measures the work."""
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
    """Return the text of a content part."""
    text_found = part.get("text", part.get("refusal"))
    return text_found if isinstance(text_found, str) else ""


def written_and_visible(text: str, budget: ReadingBudget) -> Collection[str]:
    """Return the forms of `text`: as written, with accents as separate characters (NFD), and as it looks."""
    if text.isascii():
        return dict.fromkeys((text, plain(text)))
    whole = text.encode("utf-8", "replace").decode()  # replaces lone surrogates
    return dict.fromkeys((whole, _normal("NFD", whole, budget), *visible(whole, budget)))


def visible(text: str, budget: ReadingBudget) -> Collection[str]:
    """Return two forms of `text` as it looks: normalized (`written`), and without invisible characters (`plain`)."""
    normal = written(text, budget)
    return dict.fromkeys((normal, plain(normal)))


def written(text: str, budget: ReadingBudget) -> str:
    """Return `text` with full-width digits and unusual blanks normalized, and without lone surrogates."""
    return _normal("NFKC", text, budget).encode("utf-8", "replace").decode()


def plain(text: str) -> str:
    """Return `text` without invisible characters, with one kind of dash and one kind of digit."""
    looks = {ord(each): look for each in set(text) if (look := _plain_form(each)) != each}
    return "".join(piece[0].translate(looks) for piece in _PIECE.finditer(text)) if looks else text


def _normal(form: Literal["NFD", "NFKC"], text: str, budget: ReadingBudget) -> str:
    """Return `text` in a normal form, and charge the budget for the characters that normalization adds."""
    if text.isascii():
        return text
    pieces: list[str] = []
    for piece in _PIECE.finditer(text):
        pieces.append(normalized(form, piece[0]))
        budget.spend(max(0, len(pieces[-1]) - len(piece[0])))
    return "".join(pieces)


def _plain_form(character: str) -> str | None:
    """Return the plain form of a character, or None if it is invisible or only surrounds another character."""
    if (look := _LOOKS_LIKE.get(character)) is not None:
        return look
    kind = unicodedata.category(character)
    if kind in ("Cc", "Cf", "Me") or _IGNORABLE.match(character):
        return None
    if kind == "Pd" or character == "\u2212":  # a dash or the minus sign
        return "-"
    return str(unicodedata.decimal(character)) if kind == "Nd" else character
