"""Unicode from outside: files that must be UTF-8, and normal forms in linear time.

In a normal form no letter keeps more marks than Stream-Safe Text allows (UAX #15).
"""

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

_MAX_MARKS = 30
_SNIFFED = 64  # bytes
_MARKS = {  # the longer ones first, which begin alike
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # what `surrogateescape` makes of such bytes


def read_text(path: Path, error: type[UpdraftError]) -> str:
    """The text of a UTF-8 file, without a byte order mark, its lines ended by LF. Raises `error` for another encoding,
    and OSError.
    """
    with path.open("rb") as file:
        return "".join(text_lines(file, path, error)).replace("\r\n", "\n")


def text_lines(file: io.BufferedReader | gzip.GzipFile, path: Path, error: type[UpdraftError]) -> Iterator[str]:
    """The lines of a UTF-8 file with their ends as they are. Raises `error`, which names the line that is no UTF-8."""
    if (encoding := _other_encoding(file.peek(_SNIFFED)[:_SNIFFED])) is not None:
        raise error(f"{path} is {encoding}: save it as UTF-8.")
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        for number, line in enumerate(lines, 1):
            if not line.isascii() and _NOT_UTF8.search(line):
                raise error(f"{path}, line {number}: not UTF-8: save the file as UTF-8.")
            yield line


def _other_encoding(start: bytes) -> str | None:
    """By its byte order mark, or else by the zeros of ASCII in two bytes each."""
    for name, marks in _MARKS.items():
        if start.startswith(marks):
            return name
    halves = start[::2], start[1::2]
    return "UTF-16" if len(start) >= 4 and any(not any(half) for half in halves) else None


def normalized(form: Literal["NFC", "NFD", "NFKC"], text: str) -> str:
    """`text` in a normal form. Of more than 30 marks on one letter the rest goes: no language has as many, and sorting
    them takes quadratic time, which holds up every thread.
    """
    if text.isascii():
        return text
    marks = "".join(map(re.escape, filter(_is_mark, set(text))))
    if marks:
        text = re.sub(f"([{marks}]{{{_MAX_MARKS}}})[{marks}]+", r"\1", text)
    return unicodedata.normalize(form, text)


def _is_mark(character: str) -> bool:
    """Whether it stands on the letter before it, as it is or once it is taken apart."""
    return not character.isascii() and unicodedata.combining(unicodedata.normalize("NFKD", character)[0]) != 0
