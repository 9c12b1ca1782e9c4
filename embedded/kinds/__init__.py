"""Task kinds, one module per subject; `KINDS` is the whole suite."""

from __future__ import annotations

from . import arithmetic, calendar, data, facts, logic, outside, talk, words
from .kind import Draft, Kind, Phrasings

KINDS: dict[str, Kind] = {
    kind.name: kind for page in (arithmetic, logic, words, calendar, data, facts, talk, outside) for kind in page.KINDS
}

__all__ = ["KINDS", "Draft", "Kind", "Phrasings"]
