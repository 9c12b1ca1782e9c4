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
# The same in the groups that are printed on cards, whatever marks part them: commas, dots, bars, markdown, line breaks.
_GROUPS = re.compile(
    r"(?<![0-9])(?=([3-6][0-9]{3}|2[2-7][0-9]{2})([\W_]{1,8})"
    r"(?:([0-9]{4})([\W_]{1,8})([0-9]{4})([\W_]{1,8})([0-9]{4})|([0-9]{6})([\W_]{1,8})([0-9]{4,5}))(?![0-9]))"
)
_BEFORE = re.compile(r"[0-9]{4}([\W_]{1,8})\Z")
_BEHIND = re.compile(r"([\W_]{1,8})[0-9]{4}(?![0-9])")
# The first digits that are issued.
_ISSUED = re.compile("[3-6]|2[2-7]")
_MARKDOWN = str.maketrans("", "", "*_`~ \t")
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
            CARD_DIGITS[0] <= len(digits) <= CARD_DIGITS[1] and _ISSUED.match(digits) is not None and _luhn(digits)
            for found in _DIGITS.finditer(text)
            for digits in _joined(re.split("[ -]", found[0]), 19)
        )
        or any(_is_printed_card(text, found) for found in _GROUPS.finditer(text))
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
    return (
        (spelled or width >= 4)
        and printed
        and _ISSUED.match(digits) is not None
        and len(row.splitlines()) == 1
        and _luhn(digits)
    )


def _is_printed_card(text: str, found: re.Match[str]) -> bool:
    """Whether groups of digits are a card's, and neither other numbers nor a part of a longer column of them."""
    groups = [group for group in found.groups() if group is not None]
    digits, marks = "".join(groups[::2]), {_mark(group) for group in groups[1::2]}
    if len(marks) != 1 or not _luhn(digits):
        return False
    start, end = found.start(), found.end(10) if found[10] else found.end(7)
    before, behind = _BEFORE.search(text, max(0, start - 12), start), _BEHIND.match(text, end)
    return not any(each is not None and _mark(each[1]) in marks for each in (before, behind))


def _mark(separator: str) -> str:
    """What parts two groups of digits: blanks and markdown do not count, and a line break is one however it is made."""
    return separator.replace("\r\n", "\n").translate(_MARKDOWN)


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
# After two digits of an area four more are a year, as in "05/2024", unless they go on.
_NUMBER = r"(?:[0-9]{5,8}|(?:[0-9]{3}|[03-9][0-9]{3}|1[0-8][0-9]{2}|2[1-9][0-9]{2})[ -][0-9]{3,4})"
_PHONE = (
    r"(?:(?:^|[^0-9A-Za-z])\+|\b00)[1-9](?:[ ()./-]{0,2}[0-9]){7,14}\b"
    r"|(?:\([0-9]{3}\) ?|\b[0-9]{3}[ .-])[0-9]{3}[ .-][0-9]{4}\b"
    r"|(?:\(0[1-9][0-9]{1,3}\) ?|\b0[1-9][0-9]{1,3}[ /-])[0-9]{3,8}(?:[ -]?[0-9]{2,4}){0,3}\b"
    rf"|(?:\(0[0-9]\) ?|\b0[0-9][ /-]){_NUMBER}(?:[ -]?[0-9]{{2,4}}){{0,2}}\b"
    # After dots, which are in dates and numbers as well.
    r"|\b0[1-9][0-9]{1,3}\.[0-9]{5,8}\b|\b0[1-9](?:[ .-][0-9]{2}){4}\b"
).replace(r"\b", r"(?-u:\b)")
# Keys by the forms that their issuers document. In ASCII: all of Unicode makes it megabytes.
_WORD, _KEY = "[0-9A-Za-z_]", "[0-9A-Za-z_-]"
_API_KEY = "|".join(
    (
        rf"\b(?:sk|pk|rk)[-_]{_KEY}{{20}}|\bupdraft-{_KEY}{{32}}|\bwhsec_[0-9A-Za-z+/=_-]{{24}}",  # OpenAI's, Stripe's
        rf"\b(?:hf_|npm_|gsk_|r8_|dckr_pat_|dop_v1_|shp(?:at|ca|pa|ss)_|lin_api_|xai-|pplx-|nvapi-|pypi-|hvs\.){_KEY}{{20}}",
        rf"\bSG\.{_KEY}{{16,64}}\.{_KEY}{{16}}",
        r"\bA(?:KI|SI|BI|CC)A[0-9A-Z]{16}\b|(?i:aws.?secret.?(?:access.?)?key)[^0-9A-Za-z]{1,8}[0-9A-Za-z/+]{40}",
        rf"\bgh[pousr]_{_WORD}{{30}}|\bgithub_pat_{_WORD}{{30}}",
        rf"\bgl(?:pat|oas|dt|rt|rtr|cbt|ptt|ft|soat|imt|agent|ffct|wt)-{_KEY}{{20}}",
        rf"\bxox[a-z](?:\.xox[a-z])?-{_KEY}{{10}}|\bxapp-[0-9]-{_KEY}{{10}}"
        r"|\bhooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/[0-9A-Za-z]{6}",
        rf'\bAIza{_KEY}{{35}}|\bya29\.{_KEY}{{20}}|\bGOCSPX-{_KEY}{{20}}|\b1//0{_KEY}{{30}}|"private_key_id"\s{{0,8}}:',
        r"(?i:\b(?:Account|SharedAccess)Key\s{0,2}=\s{0,2}[0-9A-Za-z+/]{32})|(?i:\bsig=[0-9A-Za-z%+/_-]{30})"
        rf"|\bSharedAccessSignature\b|{_WORD}{{3}}[0-9]Q~[0-9A-Za-z_.~-]{{31}}",  # Azure's
        r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY|\bPuTTY-User-Key-File-",
        rf"\beyJ{_KEY}{{10,}}\.eyJ{_KEY}{{10,}}\.{_KEY}",
    )
).replace(r"\b", r"(?-u:\b)")

BUILTIN: dict[str, Callable[[], Callable[[str], bool]]] = {
    "email": lambda: searcher(_EMAIL, "email"),
    "credit_card": lambda: _has_card,
    "iban": lambda: _has_iban,
    "phone": lambda: searcher(_PHONE, "phone"),
    "api_key": lambda: searcher(_API_KEY, "api_key"),
}
