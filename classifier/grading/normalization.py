"""Normalisation of answers for comparison: words with signs and operators, the result, and negations.

Input is plain text with common Markdown and LaTeX. Numbers are compared as values: 1/2, 0.5 and 50 % are equal, and a
percentage also equals the bare number, because units are ignored. Results that are not plain values (`x > 5`, `2 * y`,
12:30, a date) are compared as written, without blanks. Scripts without blanks between words are compared by character.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

from ...protocol.unicode_forms import normalized

_BLANKLESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_LETTER = rf"[^\W\d_{_BLANKLESS}]"
# Includes vowel signs and accents that are separate characters, which `\w` does not match.
_LETTERS = rf"(?:{_LETTER}|[\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0900-\u0963\u0970-\u0dff])"
_PLUS = "\u2064"  # invisible plus between a whole number and its fraction
_NUMBER = (
    rf"(?:(?<![a-z_\d])(?<!\d\.)\d++(?:{_PLUS}\d++/\d++|(?:[.:]\d++)*+)|(?<![\w.])\.\d++)(?:e[-+]?\d{{1,3}}(?!\d))?%?"
)
_TOKEN = re.compile(
    rf"{_NUMBER}"
    rf"|{_LETTER}{_LETTERS}*+(?:['_]?(?:{_LETTERS}|\d)++)*+(?:[+#]++(?!\w))?"  # "C++" differs from "C"
    rf"|[{_BLANKLESS}]"
    r"|(?<=[\w)\] ])[<>≤≥≠=](?=[\w(\[ -])"
    # Operators only between numbers or single letters: "well-known", "and/or" and "Paris - the" are two words each.
    r"|(?<=[\w)\]])(?<![^\W\d_]{2})[-+*/^](?=[\w(\[-])(?![^\W\d_]{2})"
    r"|(?<=[\w)\]] )(?<![^\W\d_]{2} )[-+*/^](?= [\w(\[-])(?! [^\W\d_]{2})"
    r"|(?<![\w)\]])-(?=[\d.(]|[^\W\d_](?!\w))"
    r"|(?<!\w)!(?=\w)"
    r"|[\u2190-\u21ff\u2600-\u27bf\U0001f000-\U0001faff]"
    r"|\d"
)
_OPERAND = (
    r"(?:(?<![\w)\]])[-+]|\(|(?<![a-z])[a-z]{1,8}\(){0,6}"
    rf"(?:{_NUMBER}(?:[a-z](?![\w(]))?|(?<!\w)(?:[b-hj-z]|[ai](?! [a-z]))(?![\w']))\){{0,6}}"
)
# A list continues after a comma only with a number or an assignment (`x = 3, y = 4`).
_EXPRESSION = re.compile(
    rf"{_OPERAND}(?:(?: ?[-+*/^<>≤≥≠=] ?| ?[,;] ?(?=[-+(]*+\d|[a-z] ?=)|,? (?:and|und|et|y) (?=[-+(]*+\d)){_OPERAND})*+"
)
_BETWEEN = re.compile(r" ?[,;] ?|,? (?:and|und|et|y) ")
_VALUE = re.compile(rf"([-+]?)([\d.]+(?:e[-+]?\d+)?)(?:{_PLUS}(\d+))?(?:/([\d.]+))?(%?)[a-z]?")
_CLAUSE_END = re.compile(r"[.,:](?!\d)|!(?!\w)|[;?\n。，、；：！？]| (?:but|sondern) ")
_DENIALS = frozenset(
    (
        *("!", "not", "no", "nor", "never", "none", "neither", "nobody", "nothing", "cannot"),
        *("nicht", "kein", "keine", "keinen", "keiner", "nie", "nein", "niet", "geen", "не", "нет", "不", "没", "沒"),
        *("ne", "pas", "non", "jamais", "aucun", "aucune", "nunca", "não"),
    )
)
_CHANGES = frozenset("-!<>≤≥≠*/^")  # tokens that change the meaning of the next word
_CHARACTER = re.compile(f"[{_BLANKLESS}]")
_NO_NAME = 6  # minimum characters of a name that may be reordered; a shorter one could be another name

_CHARACTERS = str.maketrans({"−": "-", "–": "-", "⁄": "/", "÷": "/", "×": "*", "⋅": "*", "’": "'", "≈": "="})
_VULGAR = re.compile(r"(\d?)([¼-¾⅐-⅞])")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})++(?!,?\d)")
# Pairs of a pattern and its replacement, applied in order. Purely visual Markdown and LaTeX is removed.
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.MULTILINE), written)
    for pattern, written in (
        (r"\\[dt]?frac\{(-?\d{1,300})\}\{(\d{1,300})\}", r"\1/\2"),
        (r"(?:√ ?|\\?sqrt ?)[({]?([\w.]{1,50})[)}]?", r"sqrt(\1)"),
        (r"\\(?:cdot|times)(?![a-z])", "*"),
        (r"\\(?:left|right|text|mathrm|boxed)(?![a-z])|\\[()\[\],; ]|[\\{}`]", ""),
        (r"</?(?:b|i|u|em|strong|br|p|code|sub|sup|span|div|li|ul|ol|h\d) ?/?>", " "),
        (r"^[ \t]*+(?:[-*+>]|#{1,6})(?=[ \t])", ""),
        (r"(?<=[\d)])\*\*(?=[\d(])", "^"),
        (r"\*\*+|__+|(?<!\w)_(?=\w)|(?<=\w)_(?!\w)", ""),
        (r"<=|=<", "≤"),
        (r">=", "≥"),
        (r"!=", "≠"),
        (r"==+", "="),
        (r"(?<=[a-z])[$€£¥]", " "),
        (r"[$€£¥]", ""),
        (r"(?<=\d) %", "%"),
        (r"(?<![\d./,])(\d{1,3}) (\d{1,2}/\d{1,2})(?![\d/.])", rf"\1{_PLUS}\2"),
        (r"[^\S\n]+", " "),
    )
)

_Part = frozenset[Decimal] | str


@dataclass(frozen=True, slots=True)
class _Result:
    """The final result of an answer: a value, an expression, or a list of them."""

    parts: tuple[_Part, ...]
    # Whether a word before the result negates it in the same clause.
    denied: bool

    def same(self, other: _Result) -> bool:
        """Return whether the results agree. If either has one entry, only the last entries are compared, because the
        earlier ones may be working steps."""
        if self.denied != other.denied:
            return False
        if 1 in (len(self.parts), len(other.parts)):
            return _same(self.parts[-1], other.parts[-1])
        return len(self.parts) == len(other.parts) and all(map(_same, self.parts, other.parts))


@dataclass(frozen=True, slots=True)
class NormalizedAnswer:
    """An answer as words, negations and final result, ready to compare."""

    # Words in order, including signs and operators.
    words: list[str]
    # For each word, whether its clause contains a negation.
    denied: list[bool]
    # For each word, whether it ends its clause.
    ends: list[bool]
    # Whether any clause contains a negation.
    denies: bool
    # Final result; None if the answer contains no number.
    result: _Result | None

    @classmethod
    def of(cls, answer: str) -> NormalizedAnswer:
        text = _plain(answer)
        ends = [match.end() for match in _CLAUSE_END.finditer(text)]
        tokens = [(match.group(), bisect_right(ends, match.start()), match.start()) for match in _TOKEN.finditer(text)]
        denials = {clause: at for word, clause, at in reversed(tokens) if word in _DENIALS or word.endswith("n't")}
        numbered = [match for match in _EXPRESSION.finditer(text) if any(map(str.isdigit, match.group()))]
        result = None
        if numbered:
            last = numbered[-1]
            # "Not 5" denies the result; "5 are not ripe" does not.
            denied = denials.get(bisect_right(ends, last.start()), len(text)) < last.start()
            result = _Result(_parts(last.group()), denied)
        return cls(
            [word for word, _, _ in tokens],
            [clause in denials for _, clause, _ in tokens],
            [clause != after for (_, clause, _), (_, after, _) in pairwise([*tokens, ("", -1, 0)])],
            bool(denials),
            result,
        )

    @property
    def length(self) -> float:
        """Length in words; a character of a script without blanks counts as half a word."""
        return len(self.words) - self._characters / 2

    @property
    def _characters(self) -> int:
        return sum(_CHARACTER.fullmatch(word) is not None for word in self.words)

    def contains(self, short: NormalizedAnswer) -> bool:
        """Return whether this answer contains the words of a short answer in a row ("Paris" in "It is Paris"), with the
        same negation. A lone "no" must end its clause. Longer names in scripts without blanks may be reordered.
        """
        width = len(short.words)
        if not width:
            return False
        lone = width == 1 and short.words[0] in _DENIALS
        if any(
            self.words[i : i + width] == short.words
            and any(self.denied[i : i + width]) == any(short.denied)
            and (self.ends[i] or not lone)
            and (i == 0 or self.words[i - 1] not in _CHANGES)
            for i in range(len(self.words) - width + 1)
        ):
            return True
        reordered = short._characters >= _NO_NAME and sorted(self.words) == sorted(short.words)
        return reordered and self.denies == short.denies


def _plain(answer: str) -> str:
    """Rewrite notations of the same meaning to one form."""
    text = normalized("NFC", answer).casefold().translate(_CHARACTERS)
    text = _VULGAR.sub(_spelled, text)
    text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    for pattern, written in _REWRITES:
        text = pattern.sub(written, text)
    return text.strip()


def _spelled(vulgar: re.Match[str]) -> str:
    """Spell out a fraction character ("½" as "1/2"); after a digit it becomes part of a mixed number."""
    before, fraction = vulgar.groups()
    return before + (_PLUS if before else "") + unicodedata.normalize("NFKC", fraction).translate(_CHARACTERS)


def _parts(expression: str) -> tuple[_Part, ...]:
    """Return the entries of a list, with equations reduced to their right sides and earlier working steps left out."""
    *before, last = _BETWEEN.split(expression)
    claims = [claim for claim in before if "=" not in claim or any(map(str.isalpha, claim.partition("=")[0]))]
    return tuple(_part(claim.rpartition("=")[2].replace(" ", "")) for claim in (*claims, last))


def _part(text: str) -> _Part:
    match = _VALUE.fullmatch(text.strip("()"))
    if match is None:
        return text
    sign, number, over, under, percent = match.groups()
    try:
        if over is not None:
            value = Decimal(number) + Decimal(over) / Decimal(under or 1)
        else:
            value = Decimal(number) / Decimal(under) if under else Decimal(number)
    except ArithmeticError:  # for example a version number, a division by zero, or a huge exponent
        return text
    value = value.copy_negate() if sign == "-" else value
    return frozenset((value, value / 100) if percent else (value,))


def _same(one: _Part, other: _Part) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return not one.isdisjoint(other)
