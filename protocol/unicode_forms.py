"""Unicode's normal forms in linear time: no letter keeps more marks than Stream-Safe Text allows (UAX #15)."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

__all__ = ["normalized"]

_MOST_MARKS = 30


def normalized(form: Literal["NFC", "NFD", "NFKC"], text: str) -> str:
    """`text` in a normal form. Of more than 30 marks on one letter the rest goes: no language has as many, and sorting
    them takes quadratic time, which holds up every thread.
    """
    if text.isascii():
        return text
    marks = "".join(map(re.escape, filter(_is_mark, set(text))))
    if marks:
        text = re.sub(f"([{marks}]{{{_MOST_MARKS}}})[{marks}]+", r"\1", text)
    return unicodedata.normalize(form, text)


def _is_mark(character: str) -> bool:
    """Whether it stands on the letter before it, as it is or once it is taken apart."""
    return unicodedata.combining(unicodedata.normalize("NFKD", character)[0]) != 0
