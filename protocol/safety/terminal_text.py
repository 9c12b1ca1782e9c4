"""Text of others made fit for a terminal, where an escape could write the clipboard or hide what follows.

Models, servers, files and templates are others. Whole sequences are left out, and every control character that is no
line feed or tab; so are the marks that turn the direction of writing around.
"""

from __future__ import annotations

import re

_MAX_HELD = 4096  # characters of a sequence that has no end yet
_STRING = rf"[^\x07\x1b\n\x80-\x9f]{{0,{_MAX_HELD}}}"
_BEGUN_STRING = rf"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f]){_STRING}"
_BEGUN_CSI = r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,64}"
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SEQUENCE = re.compile(rf"{_BEGUN_STRING}(?:\x07|\x1b\\|\x9c)|{_BEGUN_CSI}[@-~]|\x1b[ -/]{{0,64}}[0-~]")
_BEGUN = re.compile(rf"(?:{_BEGUN_STRING}\x1b?|{_BEGUN_CSI}|\x1b[ -/]{{0,64}})\Z")


def printable(text: str) -> str:
    """`text` without what a terminal would obey. Bytes that are no UTF-8 (PEP 383) are written as escapes."""
    return _UNPRINTABLE.sub("", _SEQUENCE.sub("", text)).encode("utf-8", "backslashreplace").decode()


class PrintableStream:
    """`printable` for text that comes in pieces, between which a sequence may be cut."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        """The text that can be shown by now."""
        text = self._held + piece
        begun = _BEGUN.search(text)
        at = len(text) if begun is None else begun.start()
        self._held = text[at:]
        return printable(text[:at])

    def end(self) -> str:
        """The rest: a sequence that never ended loses what begins it."""
        held, self._held = self._held, ""
        return printable(held)
