"""The memory that a model will take, from its header alone, and the refusal of what does not fit.

A model that does not fit swaps the machine to death: mapped weights are dropped and read again for every token. So
the guard counts them as needed, although the system would count them as free.

Sizes follow llama.cpp: KV cache = layers x tokens x KV heads x (key + value length) x bytes of the type; the compute
buffer holds the largest of its stages, which is the logits for large vocabularies.
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
#: Tokens of KV cache that a model gets unless its user wants more: answers share them (`layout`).
DEFAULT_CELLS = 4096
_BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
_CELLS = 256  # llama.cpp rounds the cells of a cache up to these
_FLOAT = 4
_TOKEN_BYTES, _MERGE_BYTES = 220, 130  # of llama.cpp's tables; measured on 152,000 tokens
_BASE = 8 * 2**20  # graphs, thread stacks, buffers of single threads
_RESERVE_SHARE, _MIN_RESERVE = 0.02, 128 * 2**20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The part of a model's options that its memory depends on."""

    context_length: int
    kv_cache_type: KvCacheType = "f16"
    # Tokens computed at once at most.
    ubatch: int = 256
    # How many of them with logits, None for all.
    outputs: int | None = None
    sequences: int = 1
    flash_attention: bool = True
    # Bytes of the files that are loaded beside the model's.
    adapters: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes. `weights` are used where they lie in the mapped file, or copied once into another form, not both."""

    weights: int
    kv_cache: int
    compute: int
    # The rows of logits and hidden states handed out.
    outputs: int
    # The vocabulary's tables, graphs, threads.
    rest: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.compute + self.outputs + self.rest


def estimate(header: GgufHeader, plan: MemoryPlan) -> Need:
    """The memory that `plan` takes for the model of a header; a little more than llama.cpp will allocate, not less."""
    tokens, merges = (header.arrays.get(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    return Need(
        weights=sum(tensor.size for tensor in header.tensors) + plan.adapters,
        kv_cache=math.ceil(sum(_layer_cache(header, plan, layer) for layer in range(_number(header, "block_count")))),
        compute=_compute(header, plan),
        outputs=_FLOAT * _outputs(plan) * (vocabulary_size(header) + _number(header, "embedding_length")),
        rest=_length(tokens) * _TOKEN_BYTES + _length(merges) * _MERGE_BYTES + _BASE,
    )


def free_memory(machine: Machine) -> int:
    """Bytes that a model may take now; a reserve is left to the rest of the machine."""
    return machine.available - max(_MIN_RESERVE, int(machine.memory * _RESERVE_SHARE))


def ensure_fits(name: str, header: GgufHeader, plan: MemoryPlan, room: int) -> Need:
    """The need of a model, if it is within `room` bytes. Raises ModelTooLargeError: needs X, has Y, what to do."""
    need = estimate(header, plan)
    if need.total <= room:
        return need
    buffers = need.compute + need.outputs + need.rest
    parts = (
        f"weights {_shown(need.weights)}, KV cache {_shown(need.kv_cache)} for "
        f"{plan.context_length:,} tokens in {plan.kv_cache_type}, buffers {_shown(buffers)}"
    )
    ways = list(_ways_out(header, plan, room))
    ways = [*ways, "let `updraft tune` choose"] if ways else ["use a smaller or more strongly quantized model"]
    raise ModelTooLargeError(
        f"{name} needs {_shown(need.total)} of memory ({parts}), and {_shown(max(0, room))} are free: "
        f"{', or '.join([*ways, 'unload another model or close other programs'])}.",
        needed=need.total,
        available=max(0, room),
    )


def largest_context(header: GgufHeader, plan: MemoryPlan, room: int) -> int:
    """The most tokens of context, up to those of `plan`, that fit into `room` bytes; 0 if not even 256 do."""
    if estimate(header, plan).total <= room:
        return plan.context_length
    low, high = 0, plan.context_length // _CELLS  # low fits or is 0, high + 1 does not
    while low < high:
        middle = (low + high + 1) // 2
        fits = estimate(header, replace(plan, context_length=middle * _CELLS)).total <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * _CELLS


def quantizable(header: GgufHeader) -> bool:
    """Whether the cache can be of a quantized type: a head must be made of whole blocks of 32 values."""
    return all(length and length % 32 == 0 for length in head_lengths(header))


def head_lengths(header: GgufHeader) -> tuple[int, int]:
    """Numbers of a key and of a value of one head; 0 where the header does not say."""
    heads = _number(header, "attention.head_count")
    head = _number(header, "embedding_length") // heads if heads else 0
    key, value = (_number(header, f"attention.{name}_length", default=head) for name in ("key", "value"))
    return key, value


def _ways_out(header: GgufHeader, plan: MemoryPlan, room: int) -> Iterator[str]:
    """Smaller contexts that fit: in the type asked for, and in eight bits where that gives more tokens."""
    tokens = _askable(header, largest_context(header, plan, room))
    if tokens:
        yield _smaller(tokens)
    if plan.kv_cache_type in ("f32", "f16") and quantizable(header):
        eight_bits = replace(plan, kv_cache_type="q8_0", flash_attention=True)
        more = _askable(header, largest_context(header, eight_bits, room))
        if more > tokens:
            yield f"{_smaller(more)} with kv_cache_type='q8_0'"


def _askable(header: GgufHeader, cells: int) -> int:
    """The context to ask for where so many cells fit: an engine adds some for itself, and knows what was trained."""
    tokens = (cells - 1) // _CELLS * _CELLS if cells else 0
    return min(tokens, _number(header, "context_length", default=tokens))


def _smaller(tokens: int) -> str:
    """Several answers at once would get the default's cells however short they may be."""
    return f"use context_length={tokens}{' and parallel=1' if tokens < DEFAULT_CELLS else ''}"


def _layer_cache(header: GgufHeader, plan: MemoryPlan, layer: int) -> float:
    """Bytes of one layer's keys and values, or of its recurrent state."""
    heads = _number(header, "attention.head_count", layer)
    groups = _number(header, "attention.head_count_kv", layer, default=heads)
    if not groups:
        return _recurrent_state(header) * plan.sequences
    head = _number(header, "embedding_length") // heads if heads else 0
    values = _number(header, "attention.key_length", default=head)
    values += _number(header, "attention.value_length", default=head)
    return _rounded(plan.context_length) * groups * values * _BYTES[plan.kv_cache_type]


def _recurrent_state(header: GgufHeader) -> int:
    """Bytes of the convolution's and the state space's memory of one sequence in one layer (Mamba and its kin)."""
    inner, state = _number(header, "ssm.inner_size"), _number(header, "ssm.state_size")
    groups, kernel = _number(header, "ssm.group_count"), _number(header, "ssm.conv_kernel")
    return _FLOAT * (max(0, kernel - 1) * (inner + 2 * groups * state) + state * inner)


def _compute(header: GgufHeader, plan: MemoryPlan) -> int:
    """Bytes of the graph's largest stage, beside the attention mask, which all layers share."""
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
    """Rows with logits in one step at most."""
    ubatch = min(plan.ubatch, plan.context_length)
    return min(plan.outputs or ubatch, ubatch)


def vocabulary_size(header: GgufHeader) -> int:
    """Tokens of a model's vocabulary."""
    tokens = header.arrays.get("tokenizer.ggml.tokens")
    return _length(tokens) or _number(header, "vocab_size")


def _number(header: GgufHeader, name: str, layer: int = 0, *, default: int = 0) -> int:
    """A hyperparameter, of one layer where they differ."""
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
