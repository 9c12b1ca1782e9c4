"""Views of a text for the privacy rules: as written, as it looks, and joined across messages or values."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

from ...protocol.http.lenient_json import rows, table, tables
from ...protocol.unicode_forms import normalized
from .detectors import CARD_DIGITS
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
_MAX_WORD = 256
_DIGIT = re.compile("[0-9]")
# The first and last words of a text, at most 256 characters.
_BEGIN = re.compile(rf".{{1,{_MAX_WORD}}}(?!\S)", re.DOTALL)
_END = re.compile(rf"(?<!\S).{{1,{_MAX_WORD}}}\Z", re.DOTALL)
_CUT = "\ufdd0"  # noncharacter in place of omitted text, so that no anchored pattern matches there
# Digit groups at the start of a text, with any marks around them.
_HEAD = re.compile(r"[\W_]*+((?:\d++[\W_]{0,8}+)*+)[\W_]*+")


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


def split_across_messages(body: Mapping[str, Any], budget: ReadingBudget) -> Iterator[str]:
    """Yield card digits that span consecutive messages of one role."""
    for messages in _texts_by_role(body):
        yield from _split_digits(map("".join, messages), budget)


def joined_messages(body: Mapping[str, Any], budget: ReadingBudget) -> Iterator[str]:
    """Yield the consecutive texts of one role joined, with and without blanks. Texts are messages and their parts. Long
    texts are cut to their ends, which are joined to the texts before and after."""
    for messages in _texts_by_role(body):
        runs = [list[str]()]
        for text in filter(None, (part for parts in messages for part in parts)):
            if len(text) <= 2 * _MAX_WORD:
                runs[-1].append(text)
                continue
            first, last = _BEGIN.match(text), _END.search(text, len(text) - _MAX_WORD - 1)
            runs[-1].append((first[0] if first else text[:_MAX_WORD]) + _CUT)
            runs.append([_CUT + (last[0] if last else text[-_MAX_WORD:])])
        for run in runs:
            for blank in ("", " ") if len(run) > 1 else ():
                joined = blank.join(run)
                budget.spend(len(joined))
                yield joined


def _texts_by_role(body: Mapping[str, Any]) -> Iterable[list[list[str]]]:
    """Return the texts of each role: of every message a list of its parts."""
    texts: dict[str, list[list[str]]] = {}
    for message in tables(body.get("messages")) or ():
        content = message.get("content")
        parts = [content] if isinstance(content, str) else [*map(text_of_part, tables(content) or ())]
        texts.setdefault(str(message.get("role")), []).append(parts)
    return texts.values()


def split_across_values(value: Any, budget: ReadingBudget) -> Iterator[str]:
    """Yield card digits that span neighbouring values of an object or a list, at any depth."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        entries = table(value)
        values = list(entries.values()) if entries is not None else rows(value) or []
        if len(values) > 1:
            yield from _split_digits([each if isinstance(each, str) else _number(each) for each in values], budget)
        waiting.extend(values)


def _split_digits(texts: Iterable[str], budget: ReadingBudget) -> Iterator[str]:
    """Yield the digit groups at the end of a text and the start of the next, if they have enough digits for a card."""
    last: list[str] = []  # groups at the end of the previous texts, the latest first
    for text in filter(None, map(str.strip, texts)):
        begin, end, whole = text[:_MAX_WORD], text[-_MAX_WORD:], len(text) <= _MAX_WORD
        if begin.isascii() and end.isascii() and not (_DIGIT.search(begin) or _DIGIT.search(end)):
            last = []
            continue
        begin = plain(written(begin, budget))
        end = begin if whole else plain(written(end, budget))
        head, only_digits = _groups(begin)
        together = [*reversed(last), *_card_groups(head)]
        if last and head and sum(map(len, together)) >= CARD_DIGITS[0]:
            yield " ".join(together)
        tail = [group[::-1] for group in _groups(end[::-1])[0]]
        last = _card_groups([*tail, *last] if only_digits and whole else tail)


def _number(value: object) -> str:
    return str(value) if isinstance(value, int) and 0 <= value < 10 ** CARD_DIGITS[1] else ""


def _groups(text: str) -> tuple[list[str], bool]:
    """Return the digit groups at the start of `text`, and whether `text` contains only digits and punctuation."""
    match = _HEAD.match(text)
    return (re.findall(r"\d+", match[1]), match.end() == len(text)) if match else ([], False)


def _card_groups(groups: Sequence[str]) -> list[str]:
    """Return the leading groups that together have fewer digits than the longest card number."""
    digits = accumulate(map(len, groups))
    return [group for group, total in zip(groups, digits, strict=True) if total < CARD_DIGITS[1]]
