"""Description of a file to fetch: source, size, licence and checksum."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import httpx

from .naming import IndexRef
from .partial_file import ResumeRecord


@dataclass(frozen=True, slots=True)
class DownloadSpec:
    """Model to fetch, and to store under `name`."""

    name: str
    # Source to show and store, without the URL's query, which may hold a secret.
    source: str
    # URL, package or local file.
    place: httpx.URL | IndexRef | Path
    size: int | None = None
    sha256: str | None = None
    licence: str | None = None
    # ETag or modification date of this version on the server.
    validator: str | None = None
    revision: str | None = None
    token: str | None = field(default=None, repr=False)

    @property
    def identity(self) -> str | None:
        """Identifier of the content, to decide whether a partial file can be resumed; None if unknown."""
        if self.sha256 is not None:
            return f"sha256:{self.sha256}"
        return None if self.validator is None else f"{self.source} {self.validator} {self.size}"

    @property
    def can_continue(self) -> bool:
        """Return whether a partial file can be resumed, which needs a known identity and size.

        Packages are excluded, because pip always downloads the whole wheel again.
        """
        return self.identity is not None and self.size is not None and not isinstance(self.place, IndexRef)

    @property
    def record(self) -> ResumeRecord:
        """Record to store with a partial file."""
        return ResumeRecord(self.identity if self.can_continue else None, self.source, self.size)
