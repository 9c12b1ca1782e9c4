"""Built-in privacy rules: e-mail addresses, cards, accounts, phone numbers, keys."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from ...protocol.errors import ConfigurationError, MissingDependencyError

CARD_DIGITS = 13, 19
_PRINTED_DIGITS = 14, 16  # minimum and maximum number of digits on nearly all cards
PERSONAL = "presidio"
_PIECE = 50_000  # characters per call; spaCy takes at most a million, and needs memory for each character
_MIN_SCORE = 0.5  # minimum score, from 0 to 1, of an entity that Presidio finds


def searcher(pattern: str, name: str) -> Callable[[str], bool]:
    """Return a search for `pattern` in a text. The engine is Rust's regex, which pydantic includes."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    try:
        validator = SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError as error:
        reason = str(error).strip().splitlines()[-1].strip().removeprefix("error: ").removeprefix("SchemaError: ")
        raise ConfigurationError(
            f"privacy.patterns.{name} is not a valid Rust regex: {reason}", param=f"privacy.patterns.{name}"
        ) from error
    return validator.isinstance_python


_MARKS = r"(?:_|[^\w\ufdd0]){1,8}"  # blanks and punctuation, but not the separator between two texts
# A card number: 13 to 19 digits, grouped or not, with an issued prefix and a valid check digit (Luhn, ISO/IEC 7812-1).
_DIGITS = re.compile(r"\d(?:[ -]?\d){12,}", re.ASCII)
# Card numbers in printed groups, separated by any marks: commas, dots, bars, markdown, line breaks.
_GROUPS = re.compile(
    r"(?<![0-9])(?=([3-6][0-9]{3}|2[2-7][0-9]{2})([\W_]{1,8})"
    r"(?:([0-9]{4})([\W_]{1,8})([0-9]{4})([\W_]{1,8})([0-9]{4})|([0-9]{6})([\W_]{1,8})([0-9]{4,5}))(?![0-9]))"
)
_BEFORE = re.compile(r"[0-9]{4}([\W_]{1,8})\Z")
_AFTER = re.compile(r"([\W_]{1,8})[0-9]{4}(?![0-9])")
_TAIL = re.compile(rf"({_MARKS})([0-9]{{1,3}})(?![0-9])")  # the last group of cards with 17 to 19 digits
# Prefixes of issued cards.
_ISSUED = re.compile("[3-6]|2[2-7]")
_MARKDOWN = str.maketrans("", "", "*_`~ \t")
# A sequence of digit groups, also across lines. Only the whole may be a card number: parts of tables do not match.
_ROW = re.compile(r"(?<!\d)\d++(?:(?:\s{1,3}+|-)\d++)++", re.ASCII)
# Whole sequences of digit groups, separated by any marks.
_RUN = re.compile(rf"(?<![0-9])[0-9]++(?:{_MARKS}+[0-9]++)++")
_IBAN_DIGITS = 8  # minimum number of digits after the check digits in every country
_VALUES = {ord(letter): str(value) for value, letter in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 10)}
_MAX_RUN = CARD_DIGITS[1] + 8 * (CARD_DIGITS[1] - 1)
# An IBAN: country, check digits and up to 30 letters and digits, in groups or not (ISO 13616).
_ACCOUNT = re.compile(
    r"(?:(?<![A-Z0-9])|(?<=IBAN))(?=([A-Z]{2}\d{2}(?:(?:_|[^\w\ufdd0]){0,3}[A-Z0-9]){11,30})(?![A-Z0-9]))",
    re.ASCII | re.IGNORECASE,
)


def _has_card(text: str) -> bool:
    """Return whether the text has a card number: with blanks or hyphens, in printed groups, or as a whole sequence."""
    return (
        any(_is_card(digits) for match in _DIGITS.finditer(text) for digits in _joined(re.split("[ -]", match[0]), 19))
        or any(_is_printed_card(text, match) for match in _GROUPS.finditer(text))
        or any(
            _is_run_of_card(match[0])
            for alone in (_ROW, _RUN)
            for match in alone.finditer(text)
            if match.end() - match.start() <= _MAX_RUN
        )
    )


def _is_card(digits: str) -> bool:
    return CARD_DIGITS[0] <= len(digits) <= CARD_DIGITS[1] and _ISSUED.match(digits) is not None and _luhn(digits)


def _is_run_of_card(run: str) -> bool:
    """Return whether all digits form one card number, as single digits, in pairs, in fours, or in longer groups."""
    groups, (_, *between, _) = re.findall("[0-9]+", run), re.split("[0-9]+", run)
    digits, sizes, marks = "".join(groups), [len(group) for group in groups], {_mark(mark) for mark in between}
    one_line = not any("\n" in mark for mark in marks)
    width = sizes[0]
    even = {width} == set(sizes[:-1]) and sizes[-1] <= width
    spelled = even and width <= 2 and one_line and len(marks) == 1
    # A sequence of only two numbers is rarely a card.
    grouped = width >= 4 and one_line and all(size >= 3 for size in sizes[1:-1]) and (len(sizes) > 2 or marks == {""})
    long = len(digits) > _PRINTED_DIGITS[1] and width in (6, 8)
    return (
        (spelled and _PRINTED_DIGITS[0] <= len(digits) <= _PRINTED_DIGITS[1])
        or (even and width == 4 and (one_line or len(marks) == 1))
        or grouped
        or long
    ) and _is_card(digits)


def _is_printed_card(text: str, match: re.Match[str]) -> bool:
    """Return whether the matched groups are a card number, not other numbers or a part of a longer column."""
    groups = [group for group in match.groups() if group is not None]
    digits, marks = "".join(groups[::2]), {_mark(group) for group in groups[1::2]}
    start, end = match.start(), match.end(10) if match[10] else match.end(7)
    tail = _TAIL.match(text, end)
    longer = tail is not None and _mark(tail[1]) in marks and _luhn(digits + tail[2])
    if len(marks) != 1 or not (longer or _luhn(digits)):
        return False
    before, after = _BEFORE.search(text, max(0, start - 12), start), _AFTER.match(text, end)
    return not any(each is not None and _mark(each[1]) in marks for each in (before, after))


def _mark(separator: str) -> str:
    """Return the text between two digit groups without blanks and markdown, with uniform line breaks."""
    return separator.replace("\r\n", "\n").translate(_MARKDOWN)


def _has_iban(text: str) -> bool:
    return any(
        15 <= len(account) <= 34 and sum(map(str.isdigit, account[4:])) >= _IBAN_DIGITS and _mod_97(account)
        for match in _ACCOUNT.finditer(text)
        for account in _prefixes(re.split(r"[\W_]+", match[1].upper(), flags=re.ASCII), 34)
    )


def _joined(groups: list[str], longest: int) -> Iterator[str]:
    """Join each group of at least four characters with the groups after it. Yield joins up to `longest` characters."""
    for first, group in enumerate(groups):
        if len(group) >= 4:  # every card has such a group; without this check, a megabyte of digits takes seconds
            yield from _prefixes(groups[first : first + longest], longest)


def _prefixes(groups: list[str], longest: int) -> Iterator[str]:
    return takewhile(lambda word: len(word) <= longest, accumulate(groups))


def _luhn(digits: str) -> bool:
    doubled = (sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    return (sum(map(int, digits[-1::-2])) + sum(doubled)) % 10 == 0


def _mod_97(account: str) -> bool:
    return int((account[4:] + account[:4]).translate(_VALUES)) % 97 == 1


# E-mail addresses, also with quoted names, IP addresses in brackets, or written as "joe (at) example [dot] com".
_AT = r"(?:@| @ | ?[(\[{<] ?(?:@|(?i:at)) ?[)\]}>] ?)"
_DOT = r"(?:\.| ?[(\[{<] ?(?:\.|(?i:dot)) ?[)\]}>] ?)"
_EMAIL = rf'(?:[\w.%+-]|"[^"\n]{{1,64}}"){_AT}(?:[\w-]+(?:{_DOT}[\w-]+)+|\[(?:IPv6:)?[0-9A-Fa-f]*[.:][0-9A-Fa-f.:]+\])'
# Phone numbers: with a country code, in North American groups, or with the leading zero of many national numbers and
# a separator. Four digits after a two-digit area code count as a year ("05/2024") unless more digits follow.
_NUMBER = r"(?:[0-9]{5,8}|(?:[0-9]{3}|[03-9][0-9]{3}|1[0-8][0-9]{2}|2[1-9][0-9]{2})[ -][0-9]{3,4})"
_PHONE = (
    r"(?:(?:^|[^0-9A-Za-z])\+|\b00)[1-9](?:[ ()./_-]{0,2}[0-9]){7,14}(?:\b|_)"
    r"|(?:\([0-9]{3}\) ?|\b[0-9]{3}[ .-])[0-9]{3}[ .-][0-9]{4}\b"
    r"|(?:\(0[1-9][0-9]{1,3}\) ?|\b0[1-9][0-9]{1,3}[ /-])[0-9]{3,8}(?:[ -]?[0-9]{2,4}){0,3}\b"
    rf"|(?:\(0[0-9]\) ?|\b0[0-9][ /-]){_NUMBER}(?:[ -]?[0-9]{{2,4}}){{0,2}}\b"
    # Phone numbers with dots. They need more digits, because dates have dots too.
    r"|\b0[1-9][0-9]{1,3}\.[0-9]{5,8}\b|\b0[1-9](?:[ .-][0-9]{2}){4}\b"
).replace(r"\b", r"(?-u:\b)")
# Keys in the forms that their issuers document. ASCII only, because Unicode classes compile to megabytes.
_WORD, _KEY, _HEX, _LETTER = "[0-9A-Za-z_]", "[0-9A-Za-z_-]", "[0-9a-f]", "[0-9A-Za-z]"
# The start of a key: not inside a word, but also after an underscore, as in `my_key_sk-...` and Markdown.
_EDGE = r"(?:\b|_)"
_BEGUN = (  # prefixes, each followed by 20 letters, digits, dashes and underscores
    "updraft-", "sk-", "pk-", "rk-", "xai-", "pplx-", "nvapi-", "pypi-", r"hv[sbr]\.", "sq0[a-z]{3}-", "ATATT", "ATBB",
    "AGE-SECRET-KEY-1", "NRAK-", "PMAK-", r"dp\.(?:pt|st|ct|sa)\.", "xkeysib-", "tskey-", "HRKU-", "tvly-", "ops_eyJ",
    "CFPAT-",
)  # fmt: skip
_SNAKE = (  # such prefixes that are also words of names: inside a name, 20 letters and digits follow without underscore
    "hf_", "npm_", "gsk_", "r8_", "dckr_pat_", "do[opr]_v1_", "shp(?:at|ca|pa|ss)_", "lin_api_", "fig[duo]_",
    "sntry[su]_", "tgp_v1_", "rubygems_", "pscale_[a-z]{2,5}_", "lsv2_[a-z]{2}_", "pcsk_", "apify_api_", "cal_live_",
    "vercel_[a-z]{2,6}_rw_", "glsa_", "fm[12]_", "[spr]k_(?:live_|test_)?",
)  # fmt: skip
_LONG = (  # prefixes, each followed by 32 letters and digits
    "secret_", "ntn_", "EAA[AC]", "key-", "dapi", "oy2", "AKCp", "sbp_", "pul-", "csk-", "jina_", "glc_", "pa-", "cio",
)  # fmt: skip
_API_KEY = "|".join(
    (
        rf"{_EDGE}(?:{'|'.join(_BEGUN)}){_KEY}{{20}}|\b(?:{'|'.join(_SNAKE)}){_KEY}{{20}}",
        rf"_(?:{'|'.join(_SNAKE)}|gh[pousr]_|github_pat_){_LETTER}{{20}}|{_EDGE}(?:{'|'.join(_LONG)}){_LETTER}{{32}}",
        rf"{_EDGE}fw_{_LETTER}{{20}}|\bwhsec_[0-9A-Za-z+/=_-]{{24}}|_whsec_[0-9A-Za-z+/=]{{24}}",
        rf"{_EDGE}SG\.{_KEY}{{16,64}}\.{_KEY}{{16}}",
        rf"{_EDGE}A(?:KI|SI|BI|CC)A[0-9A-Z]{{16}}{_EDGE}"
        r"|(?i:aws.?secret.?(?:access.?)?key)[^0-9A-Za-z]{1,8}[0-9A-Za-z/+]{40}",
        rf"\bgh[pousr]_{_WORD}{{30}}|\bgithub_pat_{_WORD}{{30}}",
        rf"{_EDGE}gl(?:pat|oas|dt|rt|rtr|cbt|ptt|ft|soat|imt|agent|ffct|wt)-{_KEY}{{20}}",
        rf"{_EDGE}xox[a-z](?:\.xox[a-z])?-{_KEY}{{10}}|{_EDGE}xapp-[0-9]-{_KEY}{{10}}"
        r"|\bhooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/[0-9A-Za-z]{6}",
        rf"{_EDGE}(?:AIza{_KEY}{{15}}|ya29\.|GOCSPX-|1//0{_KEY}{{10}}){_KEY}{{20}}",
        r'"private_key_id"\s{0,8}:',
        r"(?i:\b(?:Account|SharedAccess)Key\s{0,2}=\s{0,2}[0-9A-Za-z+/]{32})|(?i:\bsig=[0-9A-Za-z%+/_-]{30})"
        rf"|\bSharedAccessSignature\b|{_WORD}{{3}}[0-9]Q~[0-9A-Za-z_.~-]{{31}}",  # keys of Azure
        r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY|\bPuTTY-User-Key-File-",
        rf"{_EDGE}eyJ{_KEY}{{10,}}\.eyJ{_KEY}{{10,}}\.{_KEY}",
        rf"\bdiscord(?:app)?\.com/api/webhooks/[0-9]{{15,20}}/{_KEY}{{20}}"
        rf"|\b[MNO]{_KEY}{{23,27}}\.{_KEY}{{6}}\.{_KEY}{{27}}",
        # Keys of Telegram, Twilio and Mailchimp.
        rf"{_EDGE}(?:[0-9]{{8,10}}:AA{_KEY}{{30}}|(?:(?:SK|AC){_HEX}{{32}}|{_HEX}{{32}}-us[0-9]{{1,2}}){_EDGE})",
        rf"{_EDGE}(?:sl\.{_KEY}{{100}}|A{{20}}{_LETTER}{{1,40}}%{_LETTER}{{2}}|pat-[a-z]{{2,3}}[0-9]-[0-9a-f-]{{36}}"
        rf"|v1\.0-{_HEX}{{24}}-{_HEX}{{100}}|pat{_WORD}{{14}}\.{_HEX}{{64}}|[01]/[0-9]{{16}}:{_HEX}{{32}})",
        rf"\b{_WORD}{{14}}\.atlasv1\.{_KEY}{{60}}",
        # Keys of any issuer: in a header, in a URL, or after a name such as api_key.
        rf"(?i:{_EDGE}authorization\b[^0-9A-Za-z]{{1,8}}(?:bearer|basic|token)\s{{1,4}}[0-9A-Za-z+/=_.~-]{{16}})",
        rf"{_EDGE}[a-z][a-z0-9+.-]{{1,20}}://"
        r"[^\s/:@\x22'<>]{0,64}:[^\s/@\x22'<>]{3,128}@[0-9A-Za-z\[]",
        r"(?i:(?:api|access|secret|auth|private|client)[ _-]?(?:key|token|secret)|passw(?:or)?d|\bpwd)"
        r"[\x22']?\s{0,4}[:=]\s{0,4}[\x22']?(?:[0-9A-Za-z+/=-]{32}|[0-9A-Za-z!#$%&*+/=?^_-]{0,40}[0-9][!-~]{7})",
    )
).replace(r"\b", r"(?-u:\b)")

BUILTIN: dict[str, Callable[[], Callable[[str], bool]]] = {
    "email": lambda: searcher(_EMAIL, "email"),
    "credit_card": lambda: _has_card,
    "iban": lambda: _has_iban,
    "phone": lambda: searcher(_PHONE, "phone"),
    "api_key": lambda: searcher(_API_KEY, "api_key"),
}


def presidio_detector(entities: tuple[str, ...], language: str, model: str) -> Callable[[str], bool] | None:
    """Return a detector of `entities`, or None without entities. Raises MissingDependencyError, and ConfigurationError
    for a missing model, which Presidio would otherwise download."""
    if not entities:
        return None
    analyzer = _module("presidio_analyzer", "pip install presidio-analyzer")
    spacy = _module("spacy", "pip install spacy")
    is_folder = len(Path(model).parts) > 1 and Path(model).exists()  # a path, not a package name
    if not (spacy.util.is_package(model) or is_folder):
        raise MissingDependencyError(
            f"privacy.presidio_model: {model} is not installed: python -m spacy download {model}."
        )
    models = [{"lang_code": language, "model_name": model}]
    nlp = _module("presidio_analyzer.nlp_engine", "pip install presidio-analyzer").NlpEngineProvider(
        nlp_configuration={"nlp_engine_name": "spacy", "models": models}
    )
    engine = analyzer.AnalyzerEngine(nlp_engine=nlp.create_engine(), supported_languages=[language])
    known: list[str] = engine.get_supported_entities(language)
    if unknown := sorted(set(entities) - set(known)):
        raise ConfigurationError(
            f"privacy.presidio: unknown entity {', '.join(unknown)}. Known: {', '.join(sorted(known))}.",
            param="privacy.presidio",
        )

    def has_entity(text: str) -> bool:
        pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
        return any(
            engine.analyze(piece, language=language, entities=list(entities), score_threshold=_MIN_SCORE)
            for piece in pieces
        )

    return has_entity


def _module(name: str, remedy: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(f"privacy.presidio needs {name}, which is not installed: {remedy}.") from error
