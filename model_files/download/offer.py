"""A file to be fetched, described beforehand: where from, how large, under which licence, with which checksum."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import httpx

from .naming import OnIndex
from .part import Note


@dataclass(frozen=True, slots=True)
class Offer:
    """One model to be fetched under `name`."""

    name: str
    # The same, fit to be shown and kept (no query: it may hold a secret).
    source: str
    # The address, the package or the file.
    place: httpx.URL | OnIndex | Path
    size: int | None = None
    # The checksum that the bytes must have, if it is known.
    sha256: str | None = None
    licence: str | None = None
    # The server's ETag or date of this version.
    validator: str | None = None
    revision: str | None = None
    token: str | None = field(default=None, repr=False)

    @property
    def identity(self) -> str | None:
        """The same for the same bytes, so that a part of them can be continued; None: nobody can tell."""
        if self.sha256 is not None:
            return f"sha256:{self.sha256}"
        return None if self.validator is None else f"{self.source} {self.validator} {self.size}"

    @property
    def can_continue(self) -> bool:
        """Whether a part may be continued: it can be told to be of the same bytes, and when it is complete.

        pip begins a wheel anew, so nothing would be saved there.
        """
        return self.identity is not None and self.size is not None and not isinstance(self.place, OnIndex)

    @property
    def note(self) -> Note:
        """The note that is written beside a part of it."""
        return Note(self.identity if self.can_continue else None, self.source, self.size)
