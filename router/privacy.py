"""Privacy rules: what a request must not say to anybody but the model on this device."""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ..protocol.errors import ConfigurationError
from .loose import parsed, rows, table, tables

_LONG = 2**14  # characters: beyond it the search leaves the event loop to others
_LARGE = 10**40  # numbers from here on are nobody's
_BETWEEN = "\n\0\n"  # between two texts: no rule of ours reads on from one into the next
# The groups of digits that a text begins with, whatever marks stand before and behind them.
_HEAD = re.compile(r"[\W_]*+((?:\d++[\s._/-]{0,3}+)*+)[\W_]*+")
_CARD_DIGITS = 13, 19


@dataclass(frozen=True, slots=True)
class Privacy:
    """Which rules keep a request on the device. `builtin`: names of `BUILTIN`; `patterns`: regular expressions by name.

    Patterns are those of Rust's `regex`, which takes time linear in the text whatever the pattern: no look-around, no
    back-references. They match anywhere; `(?i)` in front ignores case. Raises ConfigurationError for any other.
    """

    builtin: tuple[str, ...] = ()
    patterns: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        for name in self.builtin:
            if name not in BUILTIN:
                raise ConfigurationError(
                    f"privacy.builtin: there is no {name!r}. Known: {', '.join(BUILTIN)}.", param="privacy.builtin"
                )
        for name, pattern in self.patterns.items():
            _searcher(pattern, name)

    def __bool__(self) -> bool:
        return bool(self.builtin or self.patterns)


class PrivacyRules:
    """The rules of one router, compiled."""

    def __init__(self, settings: Privacy) -> None:
        self._patterns = {name: _searcher(pattern, name) for name, pattern in settings.patterns.items()}
        self._rules = {name: BUILTIN[name]() for name in settings.builtin} | self._patterns

    async def match(self, body: dict[str, Any]) -> str | None:
        """The name of the first rule that `body` meets, in any text of it; None if there is none."""
        if not self._rules:
            return None
        said = {name: value for name, value in body.items() if not isinstance(value, int | float)}  # a seed is no text
        texts = list(_texts(said))
        together = _BETWEEN.join(texts)

        def search() -> str | None:
            return _first(self._rules, _seen(_BETWEEN.join((together, *_seams(said))))) or self._apart(texts)

        return await asyncio.to_thread(search) if len(together) > _LONG else search()

    def search(self, text: str) -> str | None:
        """The name of the first rule that `text` meets by itself."""
        return _first(self._rules, _seen(text)) or self._apart([text])

    def _apart(self, texts: Iterable[str]) -> str | None:
        """Only patterns ask for letters as they are written, and for where each text begins and ends."""
        if not self._patterns:
            return None
        met = (_first(self._patterns, _written_and_seen(text)) for text in dict.fromkeys(texts))
        return next((name for name in met if name is not None), None)


def _first(rules: Mapping[str, Callable[[str], bool]], readings: Collection[str]) -> str | None:
    return next((name for name, found in rules.items() if any(map(found, readings))), None)


def _written_and_seen(text: str) -> Collection[str]:
    """`text` as it is written, with letters and their accents apart, and as it is seen."""
    if text.isascii():
        return (text,)
    whole = text.encode("utf-8", "replace").decode()  # half a character is none
    return dict.fromkeys((whole, unicodedata.normalize("NFD", whole), *_seen(whole)))


def _seen(text: str) -> Collection[str]:
    """`text` as what it looks like, and in the plain way."""
    written = _written(text)
    return dict.fromkeys((written, _plain(written)))


def _written(text: str) -> str:
    """Full-width digits and odd blanks as what they look like; half a character is none."""
    return unicodedata.normalize("NFKC", text).encode("utf-8", "replace").decode()


def _plain(text: str) -> str:
    """What nobody sees goes, every dash is one, and so is every digit."""
    table: dict[int, str | None] = {}
    for character in set(text):
        kind = unicodedata.category(character) if character > "\x7f" else ""
        if kind == "Cf":  # soft hyphens, zero-width blanks and joiners, marks of direction
            table[ord(character)] = None
        elif kind == "Pd" or character == "\u2212":  # the last is the sign for minus
            table[ord(character)] = "-"
        elif kind == "Nd":
            table[ord(character)] = str(unicodedata.decimal(character))
    return text.translate(table) if table else text


def _texts(value: Any) -> Iterator[str]:
    """Every string and number in a request, names included; what a message says in several parts also in one piece, and
    the arguments of calls also as what their JSON says.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, int | float):
        yield repr(value) if abs(value) < _LARGE else ""
    elif (entries := table(value)) is not None:
        if parts := tables(entries.get("content")):
            yield "".join(part["text"] for part in parts if isinstance(part.get("text"), str))
        for name, item in entries.items():
            yield name
            yield from _texts(item)
            if name == "arguments" and isinstance(item, str):
                with suppress(ValueError):  # not JSON: then it is text, and was looked at
                    yield from _texts(parsed(item.encode("utf-8", "replace")))
    else:
        for item in rows(value) or ():
            yield from _texts(item)


def _seams(body: dict[str, Any]) -> Iterator[str]:
    """The long runs of digits that somebody's messages make only together: the end of one and the start of the next."""
    said: dict[Any, list[str]] = {}
    for message in tables(body.get("messages")) or ():
        content = message.get("content")
        parts = [part.get("text") for part in tables(content) or ()]
        text = content if isinstance(content, str) else "".join(part for part in parts if isinstance(part, str))
        said.setdefault(str(message.get("role")), []).append(text)
    for texts in said.values():
        last: list[str] = []  # groups of digits, the latest first
        for text in map(_plain, map(_written, texts)):
            head, only_digits = _groups(text)
            together = [*reversed(last), *_in_a_card(head)]
            if last and head and sum(map(len, together)) >= _CARD_DIGITS[0]:
                yield " ".join(together)
            tail = [group[::-1] for group in _groups(text[::-1])[0]]
            last = _in_a_card([*tail, *last] if only_digits else tail)


def _groups(text: str) -> tuple[list[str], bool]:
    """The groups of digits that `text` begins with, and whether but for marks there is nothing else in it."""
    found = _HEAD.match(text)
    return (re.findall(r"\d+", found[1]), found.end() == len(text)) if found else ([], False)


def _in_a_card(groups: Sequence[str]) -> list[str]:
    """The first of `groups`, as many as one card may have on one side of a seam."""
    digits = accumulate(map(len, groups))
    return [group for group, total in zip(groups, digits, strict=True) if total < _CARD_DIGITS[1]]


def _searcher(pattern: str, name: str) -> Callable[[str], bool]:
    """Whether `pattern` is anywhere in a text. The engine is Rust's, which pydantic brings along."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    try:
        validator = SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError as error:
        reason = str(error).strip().splitlines()[-1].strip().removeprefix("error: ").removeprefix("SchemaError: ")
        raise ConfigurationError(
            f"privacy.patterns.{name} is no pattern of Rust's regex: {reason}", param=f"privacy.patterns.{name}"
        ) from error
    return validator.isinstance_python


# A card: 13 to 19 digits, in groups or not, as issuers number them, with a right check digit (Luhn, ISO/IEC 7812-1).
_DIGITS = re.compile(r"\d(?:[ -]?\d){12,}", re.ASCII)
# The same in the groups that are printed on cards, all with the same other separator: two blanks, dots, line breaks.
_GROUPS = re.compile(r"(?<!\d)(?=(\d{4}([\s._/-]{1,3})(?:\d{4}\2\d{4}\2\d{4}|\d{6}\2\d{4,5}))(?!\d|\2\d{4}))", re.ASCII)
# An account: country, check digits and up to 30 letters and digits, in groups or not (ISO 13616).
_ACCOUNT = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]){11,60}", re.ASCII | re.IGNORECASE)


def _has_card(text: str) -> bool:
    return any(
        _CARD_DIGITS[0] <= len(digits) <= _CARD_DIGITS[1] and digits[0] in "23456" and _luhn(digits)
        for found in _DIGITS.finditer(text)
        for digits in _joined(re.split("[ -]", found[0]), 19)
    ) or any(
        found[1][0] in "23456" and _luhn(found[1].replace(found[2], "")) and not _goes_on(text, found.start(), found[2])
        for found in _GROUPS.finditer(text)
    )


def _goes_on(text: str, start: int, separator: str) -> bool:
    """Whether four digits and `separator` are before `start`: then it is a column of numbers, not a card."""
    before = text[max(0, start - len(separator) - 4) : start]
    return before.endswith(separator) and before[:4].isdigit() and len(before) == len(separator) + 4


def _has_iban(text: str) -> bool:
    return any(
        15 <= len(account) <= 34 and _mod_97(account)
        for found in _ACCOUNT.finditer(text)
        for account in _prefixes(found[0].upper().split(" "), 34)
    )


def _joined(groups: list[str], longest: int) -> Iterator[str]:
    """Every run of neighbouring groups, the first of at least four, as one word of at most `longest` characters."""
    for first, group in enumerate(groups):
        if len(group) >= 4:  # as on every card; and a megabyte of single digits would take seconds
            yield from _prefixes(groups[first : first + longest], longest)


def _prefixes(groups: list[str], longest: int) -> Iterator[str]:
    word = ""
    for group in groups:
        word += group
        if len(word) > longest:
            return
        yield word


def _luhn(digits: str) -> bool:
    doubled = (sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    return (sum(map(int, digits[-1::-2])) + sum(doubled)) % 10 == 0


def _mod_97(account: str) -> bool:
    return int("".join(str(int(character, 36)) for character in account[4:] + account[:4])) % 97 == 1


_EMAIL = r"[\w.%+-]+@[\w-]+(?:\.[\w-]+)+"
# With a country's code, in North America's groups, or with the zero of many national numbers and a separator.
_PHONE = (
    r"(?:\+|\b00)[1-9](?:[ ()./-]{0,2}\d){7,14}\b"
    r"|(?:\(\d{3}\) ?|\b\d{3}[ .-])\d{3}[ .-]\d{4}\b"
    r"|(?:\(0\d{1,4}\) ?|\b0\d{1,4}[ /-])\d{3,8}(?:[ -]?\d{2,4}){0,3}\b"
    r"|\b0[1-9]\d{1,3}\.\d{5,8}\b|\b0[1-9](?:\.\d{2}){4}\b"  # after dots, which are in dates and numbers as well
)
# Keys that say whose they are, private keys, and signed tokens (JWT). In ASCII: all of Unicode makes it megabytes.
_API_KEY = (
    (
        r"\b(?:sk|pk|rk)[-_][\w-]{20}|\bupdraft-[\w-]{32}|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_\w{30}|\bgithub_pat_\w{30}"
        r"|\bglpat-[\w-]{20}|\bxox[abeprs]-[\w-]{10}|\bAIza[\w-]{35}|\bhf_\w{30}"
        r"|-----BEGIN [A-Z ]*PRIVATE KEY|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]"
    )
    .replace(r"[\w-]", "[0-9A-Za-z_-]")
    .replace(r"\w", "[0-9A-Za-z_]")
)

BUILTIN: dict[str, Callable[[], Callable[[str], bool]]] = {
    "email": lambda: _searcher(_EMAIL, "email"),
    "credit_card": lambda: _has_card,
    "iban": lambda: _has_iban,
    "phone": lambda: _searcher(_PHONE, "phone"),
    "api_key": lambda: _searcher(_API_KEY, "api_key"),
}
