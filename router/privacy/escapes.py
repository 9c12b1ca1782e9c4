"""Decoding of escapes: those of JSON and programs, of URLs, HTML, mail and base64, also one within the other."""

from __future__ import annotations

import base64
import binascii
import re
import unicodedata
from collections.abc import Iterator
from html.entities import html5

_LAYERS = 8  # of escapes within escapes; nobody needs as many
# Each way has one group. Octal digits are C's.
_ESCAPE = re.compile(
    r"(?<!\\)\\++(?:(?-i:U)([0-9a-f]{8})|u([0-9a-f]{4})|[ux]\{0{0,8}([0-9a-f]{1,6})\}|x([0-9a-f]{2})|(0000[0-9a-f]{2})"
    r"|0?([0-3][0-7]{2})|N\{([a-z0-9 -]{2,80})\}|([nrt\"'/@.:_*-]))"
    r"|((?:%[0-9a-f]{2})++)|%u([0-9a-f]{4})"
    r"|&#(?:x0*+([0-9a-f]{1,6})|0*+([0-9]{1,7}));?"
    r"|&([a-z][a-z0-9]{1,31}+;?)",
    re.ASCII | re.IGNORECASE,
)
_OCTAL, _NAMED, _LETTER, _OCTETS, _DECIMAL, _ENTITY = 6, 7, 8, 9, 12, 13
# Marks of HTML and Markdown within a word part nothing; other tags do.
_INLINE = re.compile(
    r"</?(?:a|b|i|u|em|strong|span|font|mark|code|small|su[bp]|wbr)\b[^<>]{0,200}>|<!--[^<>]{0,200}-->"
    r"|(?<![0-9*`~_])(?:[*`~]{1,3}|__)(?![0-9*`~_])",
    re.ASCII | re.IGNORECASE,
)
_TAG = re.compile(r"</?[a-z][a-z0-9]{0,20}\b[^<>]{0,200}>", re.ASCII | re.IGNORECASE)
_MEANT = {"n": "\n", "r": "\r", "t": "\t"}
# Of mail (RFC 2045): octets, and line breaks that are none.
_QUOTED_PRINTABLE = re.compile(r"((?:=[0-9A-F]{2})++)|=[ \t]{0,8}\r?\n", re.ASCII)
# Base64 in one piece, or in lines of equal length.
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/_-]{60,}+\r?\n)*[A-Za-z0-9+/_-]{11,}+", re.ASCII)
_HEX = re.compile(
    r"(?<![0-9a-z])(?:(?:[0-9a-f]{2}){6,}+|[0-9a-f]{2}(?:[ :][0-9a-f]{2}){5,}+)(?![0-9a-z])", re.ASCII | re.IGNORECASE
)
# Data of this many characters, if it is of no text, is what nobody reads: a picture, a sound, a file.
_DATA = 256
_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\ufffd]")


class TooLongError(Exception):
    """There is more to read than the rules read of one request."""


def decoded(text: str) -> Iterator[str]:
    """`text` with its escapes decoded, once, twice and so on; then without marks of
    HTML and Markdown. Raises TooLongError for what is escaped again and again.
    """
    layers = 0
    while (meant := unescaped(text)) != text:
        if (layers := layers + 1) > _LAYERS:
            raise TooLongError
        text = meant
        yield text
    if (meant := _TAG.sub("\n", _INLINE.sub("", text))) != text:
        yield meant


def encoded_texts(text: str) -> Iterator[str]:
    """The texts encoded in `text` as mail, base64 or hexadecimal digits. Together they are no longer than `text`."""
    if "=" in text and (meant := _QUOTED_PRINTABLE.sub(_octets_of_mail, text)) != text:
        yield meant
    yield from filter(None, (_text_of(found[0]) for found in _BASE64.finditer(text)))
    for found in _HEX.finditer(text):
        octets = bytes.fromhex(re.sub("[ :]", "", found[0]))
        if readable := _readable(octets if b"\0" in octets else bytes(octet for octet in octets if octet < 128)):
            yield readable


def has_data(text: str) -> bool:
    """Whether there is base64 in `text` that stands for no text."""
    return any(
        len(found[0]) >= _DATA and _is_mixed(found[0]) and not _text_of(found[0]) for found in _BASE64.finditer(text)
    )


def unescaped(text: str) -> str:
    """`text` with characters in place of their outermost escapes."""
    if not any(mark in text for mark in "\\%&"):
        return text
    meant = _ESCAPE.sub(_character, text)
    if meant == text:
        return text
    return meant.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")  # two halves make one


def _character(found: re.Match[str]) -> str:
    kind, value = found.lastindex, found[found.lastindex or 0]
    if kind == _LETTER:
        return _MEANT.get(value.lower(), value)
    if kind == _OCTETS:
        return _of_octets(value.replace("%", ""))
    if kind == _ENTITY:
        return _of_entity(value)
    if kind == _NAMED:
        return _of_name(value)
    code = int(value, {_OCTAL: 8, _DECIMAL: 10}.get(kind or 0, 16))
    return chr(code) if code < 0x110000 else found[0]


def _of_entity(name: str) -> str:
    """Without a semicolon the name may go over into a word."""
    for end in range(len(name), 1, -1):
        for spelled in (name[:end], name[:end].lower()):
            meant = html5.get(spelled) or html5.get(f"{spelled};")
            if meant is not None:
                return meant + name[end:]
    return f"&{name}"


def _of_name(name: str) -> str:
    try:
        return unicodedata.lookup(name)
    except KeyError:
        return name


def _octets_of_mail(found: re.Match[str]) -> str:
    return _of_octets(found[1].replace("=", "")) if found[1] else ""


def _of_octets(digits: str) -> str:
    octets = bytes.fromhex(digits)
    try:
        return octets.decode()
    except UnicodeDecodeError:
        return octets.decode("latin-1")


def _text_of(data: str) -> str:
    """The text that base64 stands for; an empty one if it is none."""
    letters = "".join(data.split()).replace("-", "+").replace("_", "/")
    try:
        return _readable(base64.b64decode(letters + "=" * (-len(letters) % 4)))
    except binascii.Error:
        return ""


def _readable(octets: bytes) -> str:
    """The text that `octets` are in UTF-8 or, with a zero in it, UTF-16; an empty one if they are none."""
    try:
        text = octets.decode("utf-16-le" if b"\0" in octets else "utf-8")
    except UnicodeDecodeError:
        return ""
    return "" if _CONTROLS.search(text) else text


def _is_mixed(data: str) -> bool:
    """Whether it has capitals, small letters and digits, as all data has and few words have."""
    return all(re.search(kind, data) for kind in ("[A-Z]", "[a-z]", "[0-9]"))
