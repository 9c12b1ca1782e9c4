"""Sanitizer for untrusted text on terminals, where escape sequences could write to the clipboard or hide text.

Text from models, servers, files and templates is untrusted. Removes escape sequences, control characters except line
feed and tab, and characters that change the writing direction.
"""

from __future__ import annotations

import re

_MAX_HELD = 4096  # maximum characters of an unfinished sequence
_STRING = rf"[^\x07\x1b\n\x80-\x9f]{{0,{_MAX_HELD}}}"
_BEGUN_STRING = rf"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f]){_STRING}"
_BEGUN_CSI = r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,64}"
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SEQUENCE = re.compile(rf"{_BEGUN_STRING}(?:\x07|\x1b\\|\x9c)|{_BEGUN_CSI}[@-~]|\x1b[ -/]{{0,64}}[0-~]")
_BEGUN = re.compile(rf"(?:{_BEGUN_STRING}\x1b?|{_BEGUN_CSI}|\x1b[ -/]{{0,64}})\Z")


def printable(text: str) -> str:
    """Remove terminal control sequences from `text`. Bytes that are not UTF-8 (PEP 383) are shown as escapes."""
    return _UNPRINTABLE.sub("", _SEQUENCE.sub("", text)).encode("utf-8", "backslashreplace").decode()


class PrintableStream:
    """Incremental `printable`, for text in pieces that may split an escape sequence."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        """Return the text that is safe to show so far."""
        text = self._held + piece
        begun = _BEGUN.search(text)
        at = len(text) if begun is None else begun.start()
        self._held = text[at:]
        return printable(text[:at])

    def end(self) -> str:
        """Return the rest of the text. An unfinished sequence loses only its control characters."""
        held, self._held = self._held, ""
        return printable(held)
