"""Products with 8-bit and 4-bit weights in Triton, in the formats of `types`; `reference` defines the results.

The weights are the left operand, (features, inputs) times (inputs, tokens), because tensor cores can take that operand
from registers, where integers are converted exactly to the activations' dtype. The sums are multiplied by the scales.
"""

# Pyright cannot check the types inside Triton kernels.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.backend import num_multiprocessors
from ..runtime.numeric import FP8_MAX, cdiv, next_power_of_2
from .launch import MatmulShape, inputs_per_step, matmul_launch, split_k
from .types import FP8, SMALLEST_SCALE, Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight

_REDUCED = 1024
#: Maximum inputs per step of 8-bit weights in groups: longer steps need more registers.
_GROUPED_STEP = 64
#: Tile of INT4 weights with minima: larger ones spill registers.
_MINIMA_TOKENS = 64
#: Arguments that vary between steps. Triton must not compile separate kernels for values of 1 and multiples of 16.
_VARYING = ("num_tokens", "num_steps", "split_steps", "group_steps")
#: Number of multiprocessors assumed in Triton's interpreter: so few that even small products in tests are split.
_SMALL_GPU = 4


def int8_linear(hidden: Tensor, weight: Int8Weight) -> Tensor:
    """Map (tokens, inputs) to (tokens, features) in the dtype of `hidden`."""
    return _byte_linear(hidden, weight.data, weight)


def _byte_linear(hidden: Tensor, data: Tensor, weight: Int8Weight | Fp8Weight) -> Tensor:
    """Multiply by INT8 or FP8 `data` with terms per group of inputs."""
    (tokens, inputs), groups = hidden.shape, len(weight.scale)
    is_grouped = groups > 1 or (isinstance(weight, Int8Weight) and weight.minimum is not None)
    step = inputs_per_step(inputs // groups, tokens)
    step = min(step, _GROUPED_STEP) if is_grouped else step
    product = MatmulShape(tokens, weight.shape[0], inputs // step)
    return _linear(byte_kernel, hidden, (data, weight), product, {"GROUPED": is_grouped, "BLOCK_INPUTS": step})


def int4_linear(hidden: Tensor, weight: Int4Weight) -> Tensor:
    """Map (tokens, inputs) to (tokens, features) in the dtype of `hidden`."""
    steps, groups = len(weight.packed), len(weight.scale)
    product = MatmulShape(hidden.shape[0], weight.shape[0], steps)
    constants = {"STEP": weight.step, "GROUPS": max(1, groups // steps)}
    return _linear(int4_kernel, hidden, (weight.packed, weight), product, constants)


def fp8_linear(hidden: Tensor, weight: Fp8Weight) -> Tensor:
    """Map (tokens, inputs) to (tokens, features) in the dtype of `hidden`, multiplied by cuBLAS or CUTLASS.

    With scales per token and feature, torch returns only bfloat16, which is converted for float16 `hidden`. Weights
    with a scale per group are multiplied with unquantized activations in Triton.
    """
    if len(weight.scale) > 1:
        return _byte_linear(hidden, weight.data, weight)
    data, scale = quantize_tokens(hidden)
    if not len(hidden):
        return hidden.new_empty(0, weight.shape[0])
    out = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        data, weight.data.t(), scale_a=scale[:, None], scale_b=weight.scale, out_dtype=torch.bfloat16
    )
    return out[:, : weight.shape[0]].to(hidden.dtype)


def quantize_tokens(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `quantize_tokens_reference` in one pass over `hidden`."""
    tokens, inputs = hidden.shape
    padded = cdiv(inputs, 16) * 16
    data = torch.empty(tokens, padded, dtype=FP8, device=hidden.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
    if tokens:
        block = next_power_of_2(padded)
        fp8_tokens_kernel[(tokens,)](
            hidden, data, scale, inputs, hidden.stride(0), padded,
            SMALLEST=SMALLEST_SCALE, MAXIMUM=FP8_MAX, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return data, scale


def _linear(
    kernel: Any,
    hidden: Tensor,
    weights: tuple[Tensor, QuantizedWeight],
    product: MatmulShape,
    constants: Mapping[str, int],
) -> Tensor:
    """Launch `kernel` for numbers and their weight, and sum its splits if there are several."""
    tokens, features = product.tokens, product.features
    out = hidden.new_empty(tokens, features)
    if not tokens:
        return out
    needs_registers = isinstance(weights[1], Int4Weight) and weights[1].minimum is not None
    launch = matmul_launch(min(tokens, _MINIMA_TOKENS) if needs_registers else tokens)
    split = split_k(product, launch, num_multiprocessors(hidden.device) if hidden.is_cuda else _SMALL_GPU)
    is_whole = split.count == 1
    parts = out if is_whole else hidden.new_empty(split.count, tokens, features, dtype=torch.float32)
    grid = (cdiv(features, launch.tiles["BLOCK_FEATURES"]), cdiv(tokens, launch.tiles["BLOCK_TOKENS"]), split.count)
    numbers, weight = weights
    terms, flags = _terms(hidden, weight)
    kernel[grid](
        hidden, numbers, *terms, parts, tokens, features, product.steps, hidden.stride(0), weight.scale.stride(0),
        split.steps, max(1, product.steps // len(weight.scale)),
        **constants, **flags, **launch.tiles, num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if not is_whole:
        grid = (cdiv(out.numel(), _REDUCED),)
        reduce_kernel[grid](parts, out, out.numel(), split.count, BLOCK=_REDUCED)
    return out


def _terms(hidden: Tensor, weight: QuantizedWeight) -> tuple[list[Tensor], dict[str, int]]:
    """Return the kernels' pointers to a weight's terms and to the sums of inputs, and constants that say which exist.

    Pointers to terms that do not exist are not read.
    """
    if isinstance(weight, Fp8Weight):
        return [weight.scale] * 6, {"HAS_ZERO": 0, "HAS_MINIMUM": 0, "FACTOR_GROUPS": 0}
    terms = (weight.scale, weight.zero, weight.minimum, weight.scale_factor, weight.minimum_factor)
    sums = None  # (groups, tokens) float32
    if weight.minimum is not None:
        groups = hidden.unflatten(1, (len(weight.scale), -1))
        sums = groups.sum(2, dtype=torch.float32).t().contiguous()
    flags = {
        "HAS_ZERO": int(weight.zero is not None),
        "HAS_MINIMUM": int(weight.minimum is not None),
        "FACTOR_GROUPS": 0 if weight.scale_factor is None else len(weight.scale) // len(weight.scale_factor),
    }
    return [weight.scale if term is None else term for term in (*terms, sums)], flags


@triton.jit(do_not_specialize=_VARYING)
def byte_kernel(
    hidden, weight, scale, zero, minimum, scale_factor, minimum_factor, input_sums, out, num_tokens, num_features,
    num_steps, token_stride, group_stride, split_steps, group_steps,
    GROUPED: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_MINIMUM: tl.constexpr, FACTOR_GROUPS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of features and tokens over the steps of this split, BLOCK_INPUTS inputs each.

    A group has `group_steps` steps. Zeros are subtracted from the weights, which is exact in all types of activations.
    """
    features = tl.program_id(0) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    tokens = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    # Programs at the border read the last row instead of rows that do not exist; these results are not stored.
    row = tl.minimum(features, num_features - 1).to(tl.int64)
    column = tl.minimum(tokens, num_tokens - 1).to(tl.int64)
    first = tl.program_id(2) * split_steps
    inputs = first * BLOCK_INPUTS + tl.arange(0, BLOCK_INPUTS)
    weights = weight + row[:, None] * (num_steps * BLOCK_INPUTS) + inputs[None, :]
    activations = hidden + column[None, :] * token_stride + inputs[:, None]
    total = tl.zeros((BLOCK_FEATURES, BLOCK_TOKENS), tl.float32)
    for step in range(first, tl.minimum(first + split_steps, num_steps)):
        values = tl.load(activations)
        numbers = tl.load(weights).to(values.dtype)
        if GROUPED:
            group = step // group_steps
            if HAS_ZERO:
                numbers -= tl.load(zero + group.to(tl.int64) * group_stride + row)[:, None].to(values.dtype)
            scales = _group_terms(scale, scale_factor, group, group_stride, row, FACTOR_GROUPS)
            total += tl.dot(numbers, values, input_precision="ieee") * scales[:, None]
            if HAS_MINIMUM:
                minima = _group_terms(minimum, minimum_factor, group, group_stride, row, FACTOR_GROUPS)
                minima = tl.where(step % group_steps == 0, minima, 0.0)  # once per group
                total += minima[:, None] * tl.load(input_sums + group.to(tl.int64) * num_tokens + column)[None, :]
        else:
            if HAS_ZERO:
                numbers -= tl.load(zero + row)[:, None].to(values.dtype)
            total = tl.dot(numbers, values, total, input_precision="ieee")
        weights += BLOCK_INPUTS
        activations += BLOCK_INPUTS
    if not GROUPED:
        total *= tl.load(scale + row).to(tl.float32)[:, None]
    _store_tile(out, total, features, tokens, num_features, num_tokens)


@triton.jit(do_not_specialize=_VARYING)
def int4_kernel(
    hidden, packed, scale, zero, minimum, scale_factor, minimum_factor, input_sums, out, num_tokens, num_features,
    num_steps, token_stride, group_stride, split_steps, group_steps,
    GROUPS: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_MINIMUM: tl.constexpr, FACTOR_GROUPS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of features and tokens over the steps of this split.

    A step has GROUPS groups, or a group has `group_steps` steps.
    """
    WORDS: tl.constexpr = STEP // 4
    QUARTERS: tl.constexpr = 4 // GROUPS
    features = tl.program_id(0) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    tokens = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    row = tl.minimum(features, num_features - 1).to(tl.int64)
    column = tl.minimum(tokens, num_tokens - 1).to(tl.int64)
    first = tl.program_id(2) * split_steps
    inside = tl.arange(0, WORDS)
    weights = packed + first.to(tl.int64) * num_features * WORDS + row[:, None] * WORDS + inside[None, :]
    activations = hidden + column[None, :] * token_stride + first * STEP + inside[:, None]
    total = tl.zeros((BLOCK_FEATURES, BLOCK_TOKENS), tl.float32)
    for step in range(first, tl.minimum(first + split_steps, num_steps)):
        words = tl.load(weights)
        for index in tl.static_range(GROUPS):
            group = step * GROUPS // group_steps + index
            part = tl.zeros((BLOCK_FEATURES, BLOCK_TOKENS), tl.float32)
            zeros = tl.zeros((BLOCK_FEATURES, 1), hidden.dtype.element_ty)
            if HAS_ZERO:
                zeros = tl.load(zero + group.to(tl.int64) * group_stride + row)[:, None].to(hidden.dtype.element_ty)
            if HAS_MINIMUM:
                zeros -= 8  # with minima, numbers begin at 0
            for inner in tl.static_range(QUARTERS):
                values = tl.load(activations + (index * QUARTERS + inner) * WORDS)
                numbers = _quarter(words, index * QUARTERS + inner, zeros, values.dtype)
                part = tl.dot(numbers, values, part, input_precision="ieee")
            total += part * _group_terms(scale, scale_factor, group, group_stride, row, FACTOR_GROUPS)[:, None]
            if HAS_MINIMUM:
                minima = _group_terms(minimum, minimum_factor, group, group_stride, row, FACTOR_GROUPS)
                minima = tl.where(step % group_steps == 0, minima, 0.0)  # once per group
                total += minima[:, None] * tl.load(input_sums + group.to(tl.int64) * num_tokens + column)[None, :]
        weights += num_features * WORDS
        activations += STEP
    _store_tile(out, total, features, tokens, num_features, num_tokens)


@triton.jit
def _group_terms(terms, factors, group, group_stride, row, FACTOR_GROUPS: tl.constexpr):
    """Return the scales or minima of one group as float32."""
    values = tl.load(terms + group.to(tl.int64) * group_stride + row).to(tl.float32)
    if FACTOR_GROUPS > 0:
        values *= tl.load(factors + (group // FACTOR_GROUPS).to(tl.int64) * group_stride + row).to(tl.float32)
    return values


@triton.jit
def _quarter(words, index: tl.constexpr, zeros, dtype: tl.constexpr):
    """Return the 4-bit value number `index` of each word, as -8 to 7 in `dtype`, minus `zeros`.

    Put in the lowest mantissa bits of 2**7 (bfloat16) or 2**10 (float16), the four bits add exactly their value.
    """
    nibbles = (words >> (4 * index)) & 0xF
    if dtype == tl.bfloat16:
        values = (nibbles | 0x4300).to(tl.bfloat16, bitcast=True) - (zeros + 136.0).to(dtype)
    elif dtype == tl.float16:
        values = (nibbles | 0x6400).to(tl.float16, bitcast=True) - (zeros + 1032.0).to(dtype)
    else:
        values = nibbles.to(dtype) - (zeros + 8.0)
    return values


@triton.jit
def _store_tile(out, total, features, tokens, num_features, num_tokens):
    """Store the transposed tile into `out` (splits, tokens, features)."""
    split = tl.program_id(2).to(tl.int64)
    places = out + (split * num_tokens + tokens[None, :]) * num_features + features[:, None]
    inside = (features < num_features)[:, None] & (tokens < num_tokens)[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("num_splits",))
def reduce_kernel(parts, out, size, num_splits, BLOCK: tl.constexpr):
    """Sum `parts` (splits, size) into `out` (size,), always in the same order."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(num_splits):
        total += tl.load(parts + places, mask=places < size)
        parts += size
    tl.store(out + places, total.to(out.dtype.element_ty), mask=places < size)


@triton.jit
def fp8_tokens_kernel(
    hidden, out, scale, num_inputs, token_stride, out_stride, SMALLEST: tl.constexpr, MAXIMUM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize one token: find its largest magnitude, scale to FP8, and fill with zeros up to `out_stride`."""
    token = tl.program_id(0).to(tl.int64)
    inputs = tl.arange(0, BLOCK)
    values = tl.load(hidden + token * token_stride + inputs, mask=inputs < num_inputs, other=0.0).to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(values), axis=0), SMALLEST) / MAXIMUM
    tl.store(scale + token, step)
    rounded = tl.clamp(values / step, -MAXIMUM, MAXIMUM).to(out.dtype.element_ty)
    tl.store(out + token * out_stride + inputs, rounded, mask=inputs < out_stride)
