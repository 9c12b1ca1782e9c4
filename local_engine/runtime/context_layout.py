"""Layout of a context: cells, sequences and rows per step, derived from the options and the model.

The engine creates its context from this layout, and the memory check uses the same layout before a load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...model_files.gguf_header import GgufHeader
from ..llama.kernels import MAX_HEAD_DIM, worth_repacking
from ..llama.library import llama
from ..machine.memory_fit import DEFAULT_CELLS, KvCacheType, head_lengths
from ..options import LocalOptions
from .prefix_cache import Sharing

_ROWS = 512  # tokens per step as in llama_cpp.Llama, because another number can change the last bits of results
_ROWS_OF_OUR_ATTENTION = 128  # tokens per step with Updraft's attention kernel; 512 are not faster and need 30 MB more
_PARALLEL = 8
_OUTPUT_VALUES = 2**22  # maximum number of logits per step (16 MiB)
_PARKED = 16  # number of sequence ids for finished sequences in the prefix cache
SMALL = 100_000_000  #: models with fewer parameters use float32 attention and score prompts by default


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Traits of a model that determine its layout."""

    parameters: int
    vocab_size: int
    train_context: int
    is_recurrent: bool


@dataclass(frozen=True, slots=True)
class ContextLayout:
    """Sizes and format of one llama.cpp context."""

    # Maximum tokens of one prompt and its answer.
    context_length: int
    # Maximum number of answers generated at once.
    parallel: int
    # Number of cells in the whole KV cache, one per token.
    cells: int
    # Number of sequence ids in the KV cache.
    sequences: int
    # Maximum number of tokens in a step (`rows`), and of tokens in a step that get logits (`outputs`).
    rows: int
    outputs: int
    kv_cache_type: KvCacheType
    # Whether attention is computed in float32, which requires a float32 cache and no flash attention.
    exact: bool
    # Whether all prompts get log-probabilities of their tokens.
    scores_prompts: bool
    # Parts of the cache that sequences can share.
    sharing: Sharing

    @classmethod
    def of(cls, model: ModelTraits, options: LocalOptions) -> ContextLayout:
        """Derive the layout from model and options. Call `options.check()` before."""
        parallel, small = options.max_num_seqs or _PARALLEL, model.parameters < SMALL
        context_length = options.max_model_len or min(model.train_context, DEFAULT_CELLS)
        kv_cache_type = options.kv_cache_type or ("f32" if small else "f16")
        exact = kv_cache_type == "f32" and not options.flash_attention
        scores_prompts = small if options.prompt_logprobs is None else options.prompt_logprobs
        cells = max(context_length, min(DEFAULT_CELLS, parallel * context_length))
        # With enough cells, each answer has its own part of the cache: other answers then do not change its rounding.
        separate = exact and scores_prompts and not model.is_recurrent and cells == parallel * context_length
        sharing: Sharing = "nothing" if separate else "whole" if model.is_recurrent else "parts"
        if sharing == "parts":  # more ids and cells, for probes that recompute hidden states
            sequences, cells = 2 * parallel + _PARKED, cells + 2 * parallel
        else:
            sequences = parallel + (4 if model.is_recurrent else 0)  # four more ids for finished sequences
        rows = max(options.ubatch or _ROWS, sequences)  # llama.cpp requires at least one output per sequence id
        outputs = max(sequences, min(rows, _OUTPUT_VALUES // model.vocab_size))
        return cls(
            context_length, parallel, cells, sequences, rows, outputs, kv_cache_type, exact, scores_prompts, sharing
        )


def settled(header: GgufHeader, options: LocalOptions) -> LocalOptions:
    """Return the options with `repack` set, and with `ubatch` set if Updraft's attention kernel runs. Raises
    MissingDependencyError, ConfigurationError."""
    library = llama()
    repack, ubatch = options.repack, options.ubatch
    if repack is None:
        repack = worth_repacking(header, library.kernels)
    computes = library.kernels.attention and not library.api.llama_supports_gpu_offload()
    if ubatch is None and computes and header.parameters >= SMALL and _has_attention_kernel(header, options):
        ubatch = _ROWS_OF_OUR_ATTENTION
    return replace(options, repack=repack, ubatch=ubatch)


def _has_attention_kernel(header: GgufHeader, options: LocalOptions) -> bool:
    """Return whether Updraft's attention kernel supports the heads and the KV cache of a model that is not `SMALL`."""
    key, value = head_lengths(header)
    supported = 0 < key == value <= MAX_HEAD_DIM and key % 16 == 0
    capped = header.hyperparameter("attn_logit_softcapping") is not None
    return supported and not capped and options.kv_cache_type in (None, "f16") and options.flash_attention is not False
