"""Safe handling of untrusted Unicode: reading UTF-8 files, and normalization in linear time."""

from __future__ import annotations

import codecs
import gzip
import io
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from .errors import UpdraftError

_MAX_MARKS = 30  # combining marks per letter, the limit of Stream-Safe Text (UAX #15)
_SNIFFED = 64  # bytes at the start of a file that reveal its encoding
_MARKS = {  # UTF-32 first: its little-endian byte order mark begins with UTF-16's
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, as decoded by `surrogateescape`


def read_text(path: Path, error: type[UpdraftError]) -> str:
    """Read a UTF-8 file; drop a byte order mark and convert CRLF. Raises OSError, or `error` for another encoding."""
    with path.open("rb") as file:
        return "".join(text_lines(file, path, error)).replace("\r\n", "\n")


def text_lines(file: io.BufferedReader | gzip.GzipFile, path: Path, error: type[UpdraftError]) -> Iterator[str]:
    """Yield the lines of a UTF-8 file with their original ends. Raises `error` naming a line that is not UTF-8."""
    if (encoding := _other_encoding(file.peek(_SNIFFED)[:_SNIFFED])) is not None:
        raise error(f"{path} is {encoding}: save it as UTF-8.")
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        for number, line in enumerate(lines, 1):
            if not line.isascii() and _NOT_UTF8.search(line):
                raise error(f"{path}, line {number}: not UTF-8: save the file as UTF-8.")
            yield line


def _other_encoding(start: bytes) -> str | None:
    """Detect UTF-16 and UTF-32 by the byte order mark, or by the zero bytes of ASCII text in UTF-16."""
    for name, marks in _MARKS.items():
        if start.startswith(marks):
            return name
    halves = start[::2], start[1::2]
    return "UTF-16" if len(start) >= 4 and any(not any(half) for half in halves) else None


def normalized(form: Literal["NFC", "NFD", "NFKC"], text: str) -> str:
    """Normalize `text`. Marks beyond 30 on one letter are dropped: sorting them takes quadratic time under the GIL."""
    if text.isascii():
        return text
    marks = "".join(map(re.escape, filter(_is_mark, set(text))))
    if marks:
        text = re.sub(f"([{marks}]{{{_MAX_MARKS}}})[{marks}]+", r"\1", text)
    return unicodedata.normalize(form, text)


def _is_mark(character: str) -> bool:
    """Return whether a character is a combining mark, itself or after decomposition."""
    return not character.isascii() and unicodedata.combining(unicodedata.normalize("NFKD", character)[0]) != 0
