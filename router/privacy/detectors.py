"""What the built-in privacy rules find in a text: addresses, cards, accounts, phone numbers, keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ...protocol.errors import ConfigurationError

CARD_DIGITS = 13, 19
_PRINTED_DIGITS = 14, 16  # on nearly all cards


def searcher(pattern: str, name: str) -> Callable[[str], bool]:
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
# All the digits that follow each other on one line, and those of the next lines too: then it is a table.
_ROW = re.compile(r"(?<!\d)\d++(?:(?:\s{1,3}+|-)\d++)++", re.ASCII)
_IBAN_DIGITS = 8  # every country's accounts have more behind the check digits; words have none
_VALUES = {ord(letter): str(value) for value, letter in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 10)}
_LONGEST_ROW = _PRINTED_DIGITS[1] + 3 * (_PRINTED_DIGITS[1] - 1)
# An account: country, check digits and up to 30 letters and digits, in groups or not (ISO 13616).
_ACCOUNT = re.compile(
    r"(?:\b|(?<=IBAN))(?=([A-Z]{2}\d{2}(?:[\s.-]{0,3}[A-Z0-9]){11,30})(?![A-Z0-9]))", re.ASCII | re.IGNORECASE
)


def _has_card(text: str) -> bool:
    """Digits in any groups that one blank or hyphen parts, in those of printed cards, or alone in their row."""
    return (
        any(
            CARD_DIGITS[0] <= len(digits) <= CARD_DIGITS[1] and digits[0] in "23456" and _luhn(digits)
            for found in _DIGITS.finditer(text)
            for digits in _joined(re.split("[ -]", found[0]), 19)
        )
        or any(
            found[1][0] in "23456"
            and _luhn(found[1].replace(found[2], ""))
            and not _goes_on(text, found.start(), found[2])
            for found in _GROUPS.finditer(text)
        )
        or any(
            _is_row_of_card(found[0]) for found in _ROW.finditer(text) if found.end() - found.start() <= _LONGEST_ROW
        )
    )


def _is_row_of_card(row: str) -> bool:
    """Whether all of it is one card: digit by digit, in pairs, or in other groups with gaps of several widths."""
    groups = re.findall(r"\d+", row)
    digits, width = "".join(groups), len(groups[0])
    spelled = width <= 2 and {width} == set(map(len, groups[:-1])) and len(groups[-1]) <= width
    printed = _PRINTED_DIGITS[0] <= len(digits) <= _PRINTED_DIGITS[1]
    return (spelled or width >= 4) and printed and digits[0] in "23456" and len(row.splitlines()) == 1 and _luhn(digits)


def _goes_on(text: str, start: int, separator: str) -> bool:
    """Whether four digits and `separator` are before `start`: then it is a column of numbers, not a card."""
    before = text[max(0, start - len(separator) - 4) : start]
    return before.endswith(separator) and before[:4].isdigit() and len(before) == len(separator) + 4


def _has_iban(text: str) -> bool:
    return any(
        15 <= len(account) <= 34 and sum(map(str.isdigit, account[4:])) >= _IBAN_DIGITS and _mod_97(account)
        for found in _ACCOUNT.finditer(text)
        for account in _prefixes(re.split(r"[\s.-]+", found[1].upper()), 34)
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
    return int((account[4:] + account[:4]).translate(_VALUES)) % 97 == 1


# The name may be in quotes, the host a number in brackets.
_EMAIL = r'(?:[\w.%+-]|"[^"\n]{1,64}")@(?:[\w-]+(?:\.[\w-]+)+|\[(?:IPv6:)?[0-9A-Fa-f.:]+\])'
# With a country's code, in North America's groups, or with the zero of many national numbers and a separator.
_PHONE = (
    r"(?:\+|\b00)[1-9](?:[ ()./-]{0,2}\d){7,14}\b"
    r"|(?:\(\d{3}\) ?|\b\d{3}[ .-])\d{3}[ .-]\d{4}\b"
    r"|(?:\(0\d{1,4}\) ?|\b0\d{1,4}[ /-])\d{3,8}(?:[ -]?\d{2,4}){0,3}\b"
    r"|\b0[1-9]\d{1,3}\.\d{5,8}\b|\b0[1-9](?:[ .-]\d{2}){4}\b"  # after dots, which are in dates and numbers as well
)
# Keys that say whose they are, private keys, and signed tokens (JWT). In ASCII: all of Unicode makes it megabytes.
_API_KEY = (
    (
        r"\b(?:sk|pk|rk)[-_][\w-]{20}|\bupdraft-[\w-]{32}|\bA(?:KI|SI)A[0-9A-Z]{16}\b|\bgh[pousr]_\w{30}|\bgithub_pat_\w{30}"
        r"|\bglpat-[\w-]{20}|\bxox[abeprs]-[\w-]{10}|\bAIza[\w-]{35}|\bhf_\w{30}"
        r"|-----BEGIN [A-Z ]*PRIVATE KEY|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]"
    )
    .replace(r"[\w-]", "[0-9A-Za-z_-]")
    .replace(r"\w", "[0-9A-Za-z_]")
)

BUILTIN: dict[str, Callable[[], Callable[[str], bool]]] = {
    "email": lambda: searcher(_EMAIL, "email"),
    "credit_card": lambda: _has_card,
    "iban": lambda: _has_iban,
    "phone": lambda: searcher(_PHONE, "phone"),
    "api_key": lambda: searcher(_API_KEY, "api_key"),
}
