"""Estimate of a model's memory from its header alone, and rejection of models that do not fit.

A model that does not fit makes the machine thrash: mapped weights are evicted and read again for every token. So this
check counts mapped weights as needed, although the system counts them as free.

Sizes follow llama.cpp: KV cache = layers x tokens x KV heads x (key + value length) x bytes of the type; the compute
buffer holds the largest intermediate result, which is the logits if the vocabulary is large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ...model_files.gguf_header import GgufArray, GgufHeader
from ...protocol.errors import ModelTooLargeError
from .machine import Machine

KvCacheType = Literal["f32", "f16", "q8_0", "q4_0"]
#: Default number of tokens in a model's KV cache, which concurrent answers share (see `ContextLayout`).
DEFAULT_CELLS = 4096
_BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
_CELLS = 256  # llama.cpp rounds the number of cells up to a multiple of this
_FLOAT = 4
_TOKEN_BYTES, _MERGE_BYTES = 220, 130  # bytes per token and per merge in llama.cpp, measured with 152,000 tokens
_BASE = 8 * 2**20  # bytes of graphs, thread stacks and per-thread buffers
_RESERVE_SHARE, _MIN_RESERVE = 0.02, 128 * 2**20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The options of a model that determine its memory."""

    context_length: int
    kv_cache_type: KvCacheType = "f16"
    # Maximum tokens computed at once.
    ubatch: int = 256
    # Maximum number of tokens that get logits at once; None for all.
    outputs: int | None = None
    sequences: int = 1
    flash_attention: bool = True
    # Bytes of the adapter files, loaded beside the model's file.
    adapters: int = 0


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory need in bytes. `weights` count once, because llama.cpp uses either the mapped file or a repacked copy."""

    weights: int
    kv_cache: int
    compute: int
    # Buffer for the logits and hidden states that a step returns.
    outputs: int
    # Vocabulary tables, compute graphs and thread stacks.
    rest: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.compute + self.outputs + self.rest


def estimate(header: GgufHeader, plan: MemoryPlan) -> MemoryNeed:
    """Estimate the memory of a model under `plan`; slightly more than llama.cpp will allocate, never less."""
    tokens, merges = (header.arrays.get(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    return MemoryNeed(
        weights=sum(tensor.size for tensor in header.tensors) + plan.adapters,
        kv_cache=math.ceil(sum(_layer_cache(header, plan, layer) for layer in range(_number(header, "block_count")))),
        compute=_compute(header, plan),
        outputs=_FLOAT * _outputs(plan) * (vocabulary_size(header) + _number(header, "embedding_length")),
        rest=_length(tokens) * _TOKEN_BYTES + _length(merges) * _MERGE_BYTES + _BASE,
    )


def free_memory(machine: Machine) -> int:
    """Return the bytes that a model may take now. A reserve stays for other programs."""
    return machine.available - max(_MIN_RESERVE, int(machine.memory * _RESERVE_SHARE))


def ensure_fits(name: str, header: GgufHeader, plan: MemoryPlan, available: int) -> MemoryNeed:
    """Return the memory need if it is within `available` bytes. Raises ModelTooLargeError with sizes and remedies."""
    need = estimate(header, plan)
    if need.total <= available:
        return need
    buffers = need.compute + need.outputs + need.rest
    parts = (
        f"weights {_shown(need.weights)}, KV cache {_shown(need.kv_cache)} for "
        f"{plan.context_length:,} tokens in {plan.kv_cache_type}, buffers {_shown(buffers)}"
    )
    advice = list(_smaller_contexts(header, plan, available))
    advice = [*advice, "run `updraft tune`"] if advice else ["use a smaller or more strongly quantized model"]
    raise ModelTooLargeError(
        f"{name} needs {_shown(need.total)} of memory ({parts}), but only {_shown(max(0, available))} are free: "
        f"{', or '.join([*advice, 'unload another model or close other programs'])}.",
        needed=need.total,
        available=max(0, available),
    )


def largest_context(header: GgufHeader, plan: MemoryPlan, available: int) -> int:
    """Return the longest context, up to that of `plan`, that fits `available` bytes; 0 if not even 256 tokens fit."""
    if estimate(header, plan).total <= available:
        return plan.context_length
    low, high = 0, plan.context_length // _CELLS  # invariant: low fits or is 0, high + 1 does not fit
    while low < high:
        middle = (low + high + 1) // 2
        fits = estimate(header, replace(plan, context_length=middle * _CELLS)).total <= available
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * _CELLS


def quantizable(header: GgufHeader) -> bool:
    """Return whether the KV cache can be quantized, which requires head lengths that are multiples of 32."""
    return all(length and length % 32 == 0 for length in head_lengths(header))


def head_lengths(header: GgufHeader, layer: int = 0) -> tuple[int, int]:
    """Return the lengths of a head's key and value; 0 if the header does not state them."""
    heads = _number(header, "attention.head_count", layer)
    head = _number(header, "embedding_length") // heads if heads else 0
    key, value = (_number(header, f"attention.{name}_length", default=head) for name in ("key", "value"))
    return key, value


def _smaller_contexts(header: GgufHeader, plan: MemoryPlan, available: int) -> Iterator[str]:
    """Yield advice on smaller contexts that fit: with the given cache type, and with q8_0 if this fits more tokens."""
    tokens = _suggested_length(header, largest_context(header, plan, available))
    if tokens:
        yield _suggest_shorter(tokens)
    if plan.kv_cache_type in ("f32", "f16") and quantizable(header):
        eight_bits = replace(plan, kv_cache_type="q8_0", flash_attention=True)
        more = _suggested_length(header, largest_context(header, eight_bits, available))
        if more > tokens:
            yield f"{_suggest_shorter(more)} with kv_cache_type='q8_0'"


def _suggested_length(header: GgufHeader, cells: int) -> int:
    """Return the context length to suggest if `cells` cells fit; shorter, because the engine needs extra cells."""
    tokens = (cells - 1) // _CELLS * _CELLS if cells else 0
    return min(tokens, _number(header, "context_length", default=tokens))


def _suggest_shorter(tokens: int) -> str:
    """Suggest a context length. Below the default, the KV cache shrinks only together with `max_num_seqs=1`."""
    return f"use max_model_len={tokens}{' and max_num_seqs=1' if tokens < DEFAULT_CELLS else ''}"


def _layer_cache(header: GgufHeader, plan: MemoryPlan, layer: int) -> float:
    """Return the bytes of one layer's keys and values, or of its recurrent state."""
    heads = _number(header, "attention.head_count", layer)
    groups = _number(header, "attention.head_count_kv", layer, default=heads)
    if not groups:
        return _recurrent_state(header) * plan.sequences
    values = sum(head_lengths(header, layer))
    return _rounded(plan.context_length) * groups * values * _BYTES[plan.kv_cache_type]


def _recurrent_state(header: GgufHeader) -> int:
    """Return the bytes of the convolution and state-space memory of one sequence in one layer (Mamba-like models)."""
    inner, state = _number(header, "ssm.inner_size"), _number(header, "ssm.state_size")
    groups, kernel = _number(header, "ssm.group_count"), _number(header, "ssm.conv_kernel")
    return _FLOAT * (max(0, kernel - 1) * (inner + 2 * groups * state) + state * inner)


def _compute(header: GgufHeader, plan: MemoryPlan) -> int:
    """Return the bytes of a step's largest intermediate result and of its attention masks. All layers share both."""
    layers = range(_number(header, "block_count"))
    width = _number(header, "embedding_length")
    heads = max((_number(header, "attention.head_count", layer) for layer in layers), default=0)
    feed_forward = max((_number(header, "feed_forward_length", layer) for layer in layers), default=0)
    ubatch, cells = min(plan.ubatch, plan.context_length), _rounded(plan.context_length)
    residual = ubatch * width
    scores, mask_bytes = (0, 2) if plan.flash_attention else (heads * ubatch * cells, 4)
    stages = (
        _outputs(plan) * vocabulary_size(header) + 2 * residual,
        scores + 6 * residual,
        3 * ubatch * feed_forward + 4 * residual,
    )
    masks = 2 if _number(header, "attention.sliding_window") else 1
    return _FLOAT * max(stages) + masks * mask_bytes * ubatch * cells


def _outputs(plan: MemoryPlan) -> int:
    """Return the maximum number of tokens that get logits in one step."""
    ubatch = min(plan.ubatch, plan.context_length)
    return min(plan.outputs or ubatch, ubatch)


def vocabulary_size(header: GgufHeader) -> int:
    tokens = header.arrays.get("tokenizer.ggml.tokens")
    return _length(tokens) or _number(header, "vocab_size")


def _number(header: GgufHeader, name: str, layer: int = 0, *, default: int = 0) -> int:
    """Return a hyperparameter, of `layer` if layers differ; `default` if the header does not state it."""
    value = header.hyperparameter(name)
    if isinstance(value, GgufArray):
        value = value.items[layer] if value.items and layer < len(value.items) else None
    return value if isinstance(value, int) else default


def _rounded(tokens: int) -> int:
    return math.ceil(tokens / _CELLS) * _CELLS


def _length(array: GgufArray | None) -> int:
    return 0 if array is None else array.length


def _shown(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
