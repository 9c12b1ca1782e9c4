"""Kinds of questions that the pocket models learn, one module per subject; `KINDS` holds all of them."""

from __future__ import annotations

from . import arithmetic, calendar, data, facts, logic, outside, talk, words
from .kind import Draft, Kind, Phrasings

KINDS: dict[str, Kind] = {
    kind.name: kind for page in (arithmetic, logic, words, calendar, data, facts, talk, outside) for kind in page.KINDS
}

__all__ = ["KINDS", "Draft", "Kind", "Phrasings"]
