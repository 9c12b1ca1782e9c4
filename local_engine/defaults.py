"""What the engine chooses where its user leaves the choice, as far as that depends on the build of llama.cpp."""

from __future__ import annotations

from dataclasses import replace

from .ggml import worth_repacking
from .gguf_header import GgufHeader
from .layout import SMALL
from .llama import llama
from .options import LocalOptions

_ROWS = 128  # of a step; attention of ours is as fast with these as with 512, which take 30 MB more


def settled(header: GgufHeader, options: LocalOptions) -> LocalOptions:
    """The options with `repack`, and where our attention computes `ubatch`. Raises MissingDependencyError,
    ConfigurationError."""
    library = llama()
    repack, ubatch = options.repack, options.ubatch
    if repack is None:
        repack = worth_repacking(header, library.products)
    computes = library.products.attention and not library.api.llama_supports_gpu_offload()
    if ubatch is None and computes and header.parameters >= SMALL:
        ubatch = _ROWS
    return replace(options, repack=repack, ubatch=ubatch)
