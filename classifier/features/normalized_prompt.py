"""One form for prompts that say the same: every gate reads it, so that how a prompt is typed cannot change a decision.

Folded away are case, blanks of any kind and number, line feeds at the ends, full-width and other compatibility forms,
composed and decomposed letters, curly quotation marks, kinds of dashes, and characters that nobody sees. Kept is what
has a meaning of its own: a superscript is no digit, and a vulgar fraction no row of three characters.
"""

from __future__ import annotations

import re
import unicodedata

from ...protocol.unicode_forms import normalized

_MEANT = ("<super>", "<sub>", "<fraction>", "<circle>", "<square>")  # by the tag of their decompositions
_TYPED = (
    dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u02bc", "'")
    | dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb", '"')
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-")
    | {"\u2044": "/"}
)
_UNSEEN = "Cf"  # joiners, soft hyphens, marks of direction
_SELECTORS = range(0xFE00, 0xFE10)  # of a character's look


def normalized_prompt(text: str) -> str:
    """`text` in lower case, each run of blanks one space, each run of line breaks one, nothing at the ends."""
    lines = (" ".join(line.split()) for line in _letters(text).splitlines())
    return "\n".join(line for line in lines if line)


def _letters(text: str) -> str:
    if text.isascii():
        return text.lower()
    foreign = [c for c in set(text) if not c.isascii()]  # few, and the slow steps are for these alone
    for character in filter(_is_unseen, foreign):
        text = text.replace(character, "")
    kept = "".join(re.escape(c) for c in foreign if unicodedata.decomposition(c).startswith(_MEANT))
    pieces = re.split(f"([{kept}])", text) if kept else [text]
    # Every other piece is one of `kept`. Folding case may take letters apart, so it comes first and last.
    pieces[::2] = [normalized("NFKC", normalized("NFKC", piece).casefold()) for piece in pieces[::2]]
    text = "".join(pieces)
    for character in _TYPED.keys() & set(text):
        text = text.replace(character, _TYPED[character])
    return text


def _is_unseen(character: str) -> bool:
    return unicodedata.category(character) == _UNSEEN or ord(character) in _SELECTORS
