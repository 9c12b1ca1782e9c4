"""What escapes stand for: those of JSON and programs, of URLs, HTML, mail and base64, also one within the other."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from html.entities import html5

_LAYERS = 8  # of escapes within escapes; nobody needs as many
_ESCAPE = re.compile(
    r"(?<!\\)\\++(?:(?-i:U)([0-9a-f]{8})|u([0-9a-f]{4})|u\{0{0,8}([0-9a-f]{1,6})\}|x([0-9a-f]{2})|([nrt\"'/]))"
    r"|((?:%[0-9a-f]{2})++)"
    r"|&#(?:x0*+([0-9a-f]{1,6})|0*+([0-9]{1,7}));?"
    r"|&([a-z][a-z0-9]{1,31}+;?)",
    re.ASCII | re.IGNORECASE,
)
_MEANT = {"n": "\n", "r": "\r", "t": "\t"}
# Of mail (RFC 2045): octets, and line breaks that are none.
_QUOTED_PRINTABLE = re.compile(r"((?:=[0-9A-F]{2})++)|=[ \t]{0,8}\r?\n", re.ASCII)
# Base64 in one piece, or in lines of equal length.
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/_-]{60,}+\r?\n)*[A-Za-z0-9+/_-]{20,}+", re.ASCII)
# Data of this many characters, if it is of no text, is what nobody reads: a picture, a sound, a file.
_DATA = 256
_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\ufffd]")


class TooLongError(Exception):
    """There is more to read than the rules read of one request."""


def decoded(text: str) -> Iterator[str]:
    """What `text` says once its escapes are taken for what they stand for, once, twice and so on; then what mail and
    base64 in it say. Raises TooLongError for what is escaped again and again.
    """
    layers = 0
    while (meant := unescaped(text)) != text:
        if (layers := layers + 1) > _LAYERS:
            raise TooLongError
        text = meant
        yield text
    if "=" in text and (meant := _QUOTED_PRINTABLE.sub(_octets_of_mail, text)) != text:
        yield meant
    yield from filter(None, (_text_of(found[0]) for found in _BASE64.finditer(text)))


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
    if (letter := found[5]) is not None:
        return _MEANT.get(letter.lower(), letter)
    if (octets := found[6]) is not None:
        return _of_octets(octets.replace("%", ""))
    if (name := found[9]) is not None:
        return html5.get(name) or html5.get(name.lower()) or found[0]
    code = int(found[8]) if found[8] else int(found[1] or found[2] or found[3] or found[4] or found[7], 16)
    return chr(code) if code < 0x110000 else found[0]


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
        text = base64.b64decode(letters + "=" * (-len(letters) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return "" if _CONTROLS.search(text) else text


def _is_mixed(data: str) -> bool:
    """Whether it has capitals, small letters and digits, as all data has and few words have."""
    return all(re.search(kind, data) for kind in ("[A-Z]", "[a-z]", "[0-9]"))
