"""Checks of GGUF headers for impossible values, which llama.cpp uses as divisors and indices without checking."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .gguf_header import GgufArray, GgufHeader

_STRING, _FLOAT = 8, 6
_INTEGERS = frozenset({4, 5})
# Hyperparameter -> minimum and maximum. llama.cpp allows 512 layers and experts; the other limits exceed every model.
_RANGES = {
    "block_count": (1, 512),
    "context_length": (1, 2**31 - 1),
    "embedding_length": (1, 2**20),
    "feed_forward_length": (0, 2**24),
    "vocab_size": (1, 2**24),
    "attention.head_count": (0, 2**14),
    "attention.head_count_kv": (0, 2**14),
    "attention.key_length": (1, 2**14),
    "attention.value_length": (1, 2**14),
    "attention.sliding_window": (0, 2**32 - 1),
    "rope.dimension_count": (0, 2**14),
    "expert_count": (0, 512),
    "expert_used_count": (0, 512),
}
_POSITIVE = (
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.scaling.factor",
)
# Arrays with one item per token, and the allowed item types.
_PER_TOKEN = {"tokenizer.ggml.scores": frozenset({_FLOAT}), "tokenizer.ggml.token_type": _INTEGERS}
_OF_TEXT = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.added_tokens")


def invalid_value(header: GgufHeader) -> str:
    """Return the first impossible value in the header, worded as the end of a sentence; empty if all are valid."""
    checks = (_out_of_range, _temperature, _heads, _vocabulary, _embedding)
    return next((fault for check in checks for fault in check(header)), "")


def missing_part(header: GgufHeader) -> str:
    """Return the part that a valid file lacks to be a model, worded as the end of a sentence; empty for a model."""
    if header.metadata.get("general.type") == "adapter":
        return "the file is an adapter"
    if "tokenizer.ggml.tokens" not in header.arrays and header.hyperparameter("vocab_size") is None:
        return "the file has no vocabulary"
    return ""


def _out_of_range(header: GgufHeader) -> Iterator[str]:
    layers = header.hyperparameter("block_count")
    for name, (least, most) in _RANGES.items():
        given = header.hyperparameter(name)
        per_layer = _items(given)
        if per_layer is not None and name != "block_count" and len(per_layer) != layers:
            yield f"the field {name} has {len(per_layer)} values for {layers} layers"
        for value in (given,) if per_layer is None else per_layer:
            if value is not None and not (_is_integer(value) and least <= value <= most):
                yield f"the field {name} is {_shown(value)}, but must be {least:,} to {most:,}"
    for name in _POSITIVE:
        value = header.hyperparameter(name)
        if value is not None and not (isinstance(value, float) and math.isfinite(value) and value > 0):
            yield f"the field {name} is {_shown(value)}, but must be a finite float above 0"


def _temperature(header: GgufHeader) -> Iterator[str]:
    value = header.metadata.get("general.sampling.temp", 0.0)
    if not ((_is_integer(value) or isinstance(value, float)) and 0 <= value < math.inf):
        yield f"the field general.sampling.temp is {_shown(value)}, but must be a finite number of at least 0"


def _heads(header: GgufHeader) -> Iterator[str]:
    """Check the numbers of attention heads and experts, some of which llama.cpp uses as divisors."""
    heads, groups = header.hyperparameter("attention.head_count"), header.hyperparameter("attention.head_count_kv")
    if heads == 0 and any(".attn_q" in tensor.name for tensor in header.tensors):
        yield "the model has attention, but its attention.head_count is 0"
    width = header.hyperparameter("embedding_length")
    if _is_integer(heads) and heads and _is_integer(width) and header.hyperparameter("attention.key_length") is None:
        if width % heads:
            yield f"the embedding_length of {width} is not divisible by the {heads} attention heads"
        rotated = header.hyperparameter("rope.dimension_count")
        if _is_integer(rotated) and rotated > width // heads:
            yield f"the rope.dimension_count of {rotated} is more than the {width // heads} values of a head"
    if _is_integer(heads) and _is_integer(groups) and groups and heads % groups:
        yield f"the {heads} attention heads are not divisible by the {groups} key/value heads"
    experts, used = (header.hyperparameter(name) or 0 for name in ("expert_count", "expert_used_count"))
    if _is_integer(experts) and _is_integer(used) and (used > experts or (experts and not used)):
        yield f"the field expert_used_count is {used}, but the model has {experts} experts"


def _vocabulary(header: GgufHeader) -> Iterator[str]:
    """Check the vocabulary. llama.cpp reads one score and one type per token without checking the array lengths."""
    if header.metadata.get("tokenizer.ggml.model") in ("none", "no_vocab"):
        yield "the file has no vocabulary"
    for name in _OF_TEXT:
        array = header.arrays.get(name)
        if name in header.metadata or (array is not None and array.kind != _STRING):
            yield f"the field {name} is not a list of texts"
    tokens = header.arrays.get("tokenizer.ggml.tokens")
    if tokens is None:
        return
    if tokens.length == 0:
        yield "the vocabulary is empty"
    for name, kinds in _PER_TOKEN.items():
        array = header.arrays.get(name)
        if name in header.metadata or (array is not None and array.kind not in kinds):
            yield f"the field {name} has the wrong type"
        elif array is not None and array.length != tokens.length:
            yield f"the field {name} has {array.length:,} items for {tokens.length:,} tokens"


def _embedding(header: GgufHeader) -> Iterator[str]:
    """Check that the embedding table has one row of the model's width per token."""
    table = next((tensor for tensor in header.tensors if tensor.name == "token_embd.weight"), None)
    tokens, width = header.arrays.get("tokenizer.ggml.tokens"), header.hyperparameter("embedding_length")
    if table is None or tokens is None or not _is_integer(width):
        return
    if table.shape != (width, tokens.length):
        yield f"the tensor token_embd.weight has the shape {table.shape}, expected {(width, tokens.length)}"


def _items(value: Any) -> tuple[Any, ...] | None:
    """Return the per-layer values of an array; None for a scalar."""
    return (value.items or ()) if isinstance(value, GgufArray) else None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else repr(value)[:60]
