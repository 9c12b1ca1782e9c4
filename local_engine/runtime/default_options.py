"""Defaults that depend on the build of llama.cpp."""

from __future__ import annotations

from dataclasses import replace

from ...model_files.gguf_header import GgufHeader
from ..llama.kernels import MAX_HEAD_DIM, worth_repacking
from ..llama.library import llama
from ..machine.memory_fit import head_lengths
from ..options import LocalOptions
from .context_layout import SMALL

_ROWS = 128  # tokens per step; Updraft's attention is as fast with 128 as with 512, which take 30 MB more


def settled(header: GgufHeader, options: LocalOptions) -> LocalOptions:
    """Return the options with defaults for `repack` and, if Updraft's attention kernel runs, `ubatch`. Raises
    MissingDependencyError, ConfigurationError."""
    library = llama()
    repack, ubatch = options.repack, options.ubatch
    if repack is None:
        repack = worth_repacking(header, library.kernels)
    computes = library.kernels.attention and not library.api.llama_supports_gpu_offload()
    if ubatch is None and computes and header.parameters >= SMALL and _attention_is_ours(header, options):
        ubatch = _ROWS
    return replace(options, repack=repack, ubatch=ubatch)


def _attention_is_ours(header: GgufHeader, options: LocalOptions) -> bool:
    """Return whether Updraft's attention kernel can run a model of 100 million parameters or more."""
    key, value = head_lengths(header)
    of_ours = 0 < key == value <= MAX_HEAD_DIM and key % 16 == 0
    capped = header.hyperparameter("attn_logit_softcapping") is not None
    return of_ours and not capped and options.kv_cache_type in (None, "f16") and options.flash_attention is not False
