"""Decoding of (nested) escapes and encodings in JSON, program code, URLs, HTML, mail and encoded bytes."""

from __future__ import annotations

import base64
import re
import struct
import unicodedata
from collections.abc import Callable, Iterator
from html.entities import html5

_LAYERS = 8  # maximum levels of nested escapes, more than in real texts
# Escapes, with one regex group per notation. Octal escapes are those of C.
_ESCAPE = re.compile(
    r"(?<!\\)\\++(?:(?-i:U)([0-9a-f]{8})|u([0-9a-f]{4})|[ux]\{0{0,8}([0-9a-f]{1,6})\}|x([0-9a-f]{2})|(0000[0-9a-f]{2})"
    r"|0?([0-3][0-7]{2})|N\{([a-z0-9 -]{2,80})\}|([nrt!-/:-@\[\]-`{}~]))"
    r"|((?:%[0-9a-f]{2})++)|%u([0-9a-f]{4})"
    r"|&#(?:x0*+([0-9a-f]{1,6})|0*+([0-9]{1,7}));?"
    r"|&([a-z][a-z0-9]{1,31}+;?)",
    re.ASCII | re.IGNORECASE,
)
_OCTAL, _NAMED, _LETTER, _OCTETS, _DECIMAL, _ENTITY = 6, 7, 8, 9, 12, 13
# Attributes of a tag. Their quoted values may contain ">".
_ATTRIBUTES = r"""\b(?:(?:"[^"]{0,200}"|'[^']{0,200}'|[^<>]){0,200}+|[^<>]{0,200})>"""
# Inline marks of HTML and Markdown, which unlike other tags do not separate words.
_INLINE = re.compile(  # begins with a set of characters, which the regex engine finds quickly
    r"[<*`~_!\[\]](?:"
    rf"(?<=<)(?:/?(?:a|b|i|u|em|strong|span|font|mark|code|small|su[bp]|wbr){_ATTRIBUTES}|!--.{{0,200}}?-->)"
    r"|(?<=[*`~])(?<![0-9*`~].)[*`~]{0,2}(?![0-9*`~])|(?<=_)(?<![0-9*`~_].)_(?![0-9*`~_])"
    r"|(?:(?<=\[)|(?<=!)\[)(?=[^\[\]]{0,200}\]\()|(?<=\])\([^()\s]{0,500}\))",
    re.ASCII | re.IGNORECASE | re.DOTALL,
)
_TAG = re.compile(rf"</?[a-z][a-z0-9]{{0,20}}{_ATTRIBUTES}", re.ASCII | re.IGNORECASE)
# Marks that may begin or end emphasis (CommonMark 0.31), which a single underscore inside a word cannot.
_EMPHASIS = re.compile(r"[*_`~=](?:(?<=_)(?:(?<!\w_)_{0,2}|_{0,2}(?!\w))|(?<=[*`~])[*`~]{0,2}|(?<==)=)")
_MAX_EMPHASIS = 256  # characters between two paired marks
_BREAK = re.compile(r"<[Bb][Rr]\b[^<>]{0,200}>|\\\n")  # marked line breaks of HTML and Markdown
_MEANT = {"n": "\n", "r": "\r", "t": "\t"}
# Quoted-printable (RFC 2045): octets, and soft line breaks.
_QUOTED_PRINTABLE = re.compile(r"((?:=[0-9A-F]{2})++)|=[ \t]{0,8}\r?\n", re.ASCII)
# Base64 in one piece, or in lines of equal length.
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/_-]{60,}+\r?\n)*[A-Za-z0-9+/_-]{11,}+", re.ASCII)
_HEX = re.compile(
    r"(?<![0-9a-z])(?:(?:[0-9a-f]{2}){6,}+|[0-9a-f]{2}(?:[ :][0-9a-f]{2}){5,}+"
    r"|0x[0-9a-f]{2}(?:[, ]{1,2}0x[0-9a-f]{2}){5,}+)(?![0-9a-z])",
    re.ASCII | re.IGNORECASE,
)
# Lines of a hexadecimal dump, as of xxd and `hexdump -C`: offset, octets, and perhaps their text.
_DUMP = re.compile(
    r"^[0-9a-f]{7,8}:?((?: {1,2}[0-9a-f]{2}(?:[0-9a-f]{2})?){1,16}+)(?: {2}.*)?$", re.ASCII | re.MULTILINE
)
# Tag characters: invisible copies of ASCII.
_TAGS = {0xE0000 + code: code for code in range(0x20, 0x7F)}
# Base32 (RFC 4648) of ASCII text: one bit is zero in five of every eight letters, unlike in most words of a language.
_BASE32_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_BASE32_DIGITS = str.maketrans(_BASE32_LETTERS, "0123456789ABCDEFGHIJKLMNOPQRSTUV")
_BASE32_GROUP = "".join(
    f"[{''.join(letter for value, letter in enumerate(_BASE32_LETTERS) if not value & zero)}]"
    for zero in (0b10000, 0b10, 0, 0b1000, 0b1, 0, 0b100, 0)
)
_BASE32 = re.compile(
    rf"(?<![A-Z0-9])(?=[A-Z2-7]{{10}})(?:{_BASE32_GROUP})++[A-Z2-7]{{0,7}}+(?![A-Z0-9])", re.ASCII | re.IGNORECASE
)
# Base85 and Ascii85: words with characters that base64 lacks, or text between Adobe's marks <~ and ~>.
_BASE85 = re.compile(r"(?<!\S)(?=[A-Za-z0-9+/=_-]*+[^A-Za-z0-9+/=_\s-])[!-~]{9,}+", re.ASCII)
_OPENING = ("(", "[", "{", "<", "`")
_FRAMED = re.compile(r"<~([!-uz\s]{8,}+)~>", re.ASCII)
# UTF-7 (RFC 2152), which writes non-ASCII text as base64 of UTF-16.
_UTF7 = re.compile(r"\+([A-Za-z0-9+/]{3,}+)-?", re.ASCII)
# Encoded data of this many characters that is not text (a picture, sound or file) counts as unreadable.
_DATA = 256
_KINDS = ("[A-Z]", "[a-z]", "[0-9]")
_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\ufffd]")


class TooLongError(Exception):
    """The request has more text than the privacy rules read."""


class ReadingBudget:
    """Number of characters that the rules may still read of one request, over all decoded forms of its texts."""

    def __init__(self, most: int) -> None:
        self.left = most

    def spend(self, characters: int) -> None:
        """Count characters that were read. Raises TooLongError if the budget is used up."""
        self.left -= characters
        if self.left < 0:
            raise TooLongError


def decoded(text: str) -> Iterator[str]:
    """Yield `text` with each level of escapes decoded. Raises TooLongError for too many nested escapes."""
    layers = 0
    while (meant := unescaped(text)) != text:
        if (layers := layers + 1) > _LAYERS:
            raise TooLongError
        text = meant
        yield text


def without_tags(text: str) -> str:
    """Return `text` without HTML tags and Markdown marks, except marks that may belong to base64, names or products."""
    return _TAG.sub("\n", _INLINE.sub("", text))


def without_breaks(text: str) -> str:
    """Return `text` with a blank for each marked line break, except between digits: a column is not a number."""
    return _BREAK.sub(lambda match: "\n" if _is_between_digits(text, *match.span()) else " ", text)


def without_emphasis(text: str) -> str:
    """Return `text` without pairs of Markdown's emphasis marks on one line, also nested or beside digits."""
    opened, cuts = dict[str, tuple[int, int, bool]](), list[tuple[int, int]]()
    for match in _EMPHASIS.finditer(text):
        (begin, end), mark = match.span(), match[0]
        before, after = text[begin - 1 : begin], text[end : end + 1]
        is_product = _is_between_digits(text, begin, end)
        start, inner, began_product = opened.get(mark, (0, -1, False))
        closes = before.strip() and not (mark[0] == "_" and after.isalnum()) and not (is_product and began_product)
        is_near = 0 <= inner < begin <= inner + _MAX_EMPHASIS
        if closes and is_near and "\n" not in (inside := text[inner:begin]) and any(map(str.isalnum, inside)):
            cuts += (start, inner), (begin, end)
            del opened[mark]
        elif after.strip() and not (mark[0] == "_" and before.isalnum()):
            opened[mark] = begin, end, is_product
    cuts.sort()
    starts, ends = [0, *(end for _, end in cuts)], [*(begin for begin, _ in cuts), len(text)]
    return "".join(text[start:end] for start, end in zip(starts, ends, strict=True)) if cuts else text


def _is_between_digits(text: str, begin: int, end: int) -> bool:
    return text[begin - 1 : begin].isdigit() and text[end : end + 1].isdigit()


def encoded_texts(text: str) -> Iterator[str]:
    """Yield texts encoded in `text` as mail, UTF-7, base64, base32 or hexadecimal; none is longer than `text`."""
    if "=" in text and (meant := _QUOTED_PRINTABLE.sub(_octets_of_mail, text)) != text:
        yield meant
    for match in _BASE64.finditer(text):  # underscores around base64 may be Markdown
        yield from filter(None, map(_text_of, dict.fromkeys((match[0], match[0].strip("_")))))
    if "+" in text and (meant := _UTF7.sub(_piece_of_utf7, text)) != text:
        yield meant
    yield from filter(None, (_decoded(_base32, match[0]) for match in _BASE32.finditer(text)))
    if (meant := text.translate(_TAGS)) != text:
        yield meant
    dump = "".join(match[1] for match in _DUMP.finditer(text)).replace(" ", "")
    for match in _HEX.finditer(f"{text}\n{dump}" if dump else text):
        octets = bytes.fromhex(re.sub("0x|[ :,]", "", match[0]))
        if readable := _readable(octets if b"\0" in octets else bytes(octet for octet in octets if octet < 128)):
            yield readable


def base85_texts(text: str, budget: ReadingBudget) -> Iterator[str]:
    """Yield the base85 texts in `text`, whose escapes must not be decoded yet. Raises TooLongError."""
    for match in _FRAMED.finditer(text):
        yield from filter(None, (_decoded(base64.a85decode, match[1]),))
    for match in _BASE85.finditer(text):
        bare = match[0].strip("\"'.,:")
        for word in dict.fromkeys((match[0], bare, bare[1:-1] if bare.startswith(_OPENING) else bare)):
            budget.spend(len(word))
            yield from filter(None, (_decoded(decode, word) for decode in (base64.b85decode, base64.a85decode)))


def has_data(text: str) -> bool:
    """Return whether `text` has long base64 data (capitals, small letters and digits) that does not encode text."""
    long = (match[0] for match in _BASE64.finditer(text) if len(match[0]) >= _DATA)
    return any(all(re.search(kind, data) for kind in _KINDS) and not _text_of(data) for data in long)


def unescaped(text: str) -> str:
    """Return `text` with its escapes (backslash, percent, HTML) decoded once; nested escapes stay escaped."""
    if not any(mark in text for mark in "\\%&"):
        return text
    meant = _ESCAPE.sub(_character, text)
    if meant == text:
        return text
    return meant.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")  # joins surrogate pairs


def _character(match: re.Match[str]) -> str:
    kind, value = match.lastindex, match[match.lastindex or 0]
    if kind == _LETTER:
        return _MEANT.get(value.lower(), value)
    if kind == _OCTETS:
        return _decode_octets(value.replace("%", ""))
    if kind == _ENTITY:
        return _entity_character(value)
    if kind == _NAMED:
        return _named_character(value)
    code = int(value, {_OCTAL: 8, _DECIMAL: 10}.get(kind or 0, 16))
    return chr(code) if code < 0x110000 else match[0]


def _entity_character(name: str) -> str:
    """Return the character of an HTML entity, and the letters after it if the entity ends without a semicolon."""
    for end in range(len(name), 1, -1):
        for spelled in (name[:end], name[:end].lower()):
            meant = html5.get(spelled) or html5.get(f"{spelled};")
            if meant is not None:
                return meant + name[end:]
    return f"&{name}"


def _named_character(name: str) -> str:
    try:
        return unicodedata.lookup(name)
    except KeyError:
        return name


def _octets_of_mail(match: re.Match[str]) -> str:
    return _decode_octets(match[1].replace("=", "")) if match[1] else ""


def _decode_octets(digits: str) -> str:
    octets = bytes.fromhex(digits)
    try:
        return octets.decode()
    except UnicodeDecodeError:
        return octets.decode("latin-1")


def _text_of(data: str) -> str:
    """Return the text in base64 data, or "" if the data is not text."""
    letters = "".join(data.split()).replace("-", "+").replace("_", "/")
    return _decoded(base64.b64decode, letters + "=" * (-len(letters) % 4))


def _decoded(decode: Callable[[str], bytes], data: str) -> str:
    """Return the text in encoded data, or "" if the data is not text."""
    try:
        return _readable(decode(data))
    except (ValueError, struct.error):
        return ""


def _base32(data: str) -> bytes:
    bits = 5 * len(data)
    return (int(data.upper().translate(_BASE32_DIGITS), 32) >> bits % 8).to_bytes(bits // 8, "big")


def _piece_of_utf7(match: re.Match[str]) -> str:
    octets = base64.b64decode(match[1] + "A" * (-len(match[1]) % 4))
    return octets[: len(match[1]) * 3 // 4 // 2 * 2].decode("utf-16-be", "replace")


def _readable(octets: bytes) -> str:
    """Return the text of octets in UTF-8, or in UTF-16 if they have a zero byte; "" if they are not text."""
    try:
        text = octets.decode("utf-16-le" if b"\0" in octets else "utf-8")
    except UnicodeDecodeError:
        return ""
    return "" if _CONTROLS.search(text) else text
