"""Cases of `updraft bench kernels`: one small function per kernel, with the shapes to call it with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.activation.ops import gated_activation
from ...kernels.activation.reference import gated_activation_reference
from ...kernels.activation.types import Activation
from ...kernels.linear.ops import quantized_linear
from ...kernels.linear.quantization import quantize_fp8, quantize_int4, quantize_int8
from ...kernels.linear.types import QuantizedWeight
from ...kernels.lora.ops import add_lora
from ...kernels.lora.types import LoraPlan, LoraWeights
from ...kernels.norm.ops import add_rms_norm, rms_norm
from ...kernels.norm.reference import rms_norm_reference
from ...kernels.norm.types import Norm
from ...kernels.sampling.ops import sample
from ...kernels.sampling.types import Sampling
from .attention_cases import attention_cases
from .measure import Case, Run

_DTYPE = torch.bfloat16
_SETS = 4
_RANK = 16
_HIDDEN, _INTERMEDIATE, _VOCABULARY = 4096, 14336, 128256  # sizes of Llama 3.1 8B
_FORMATS: Mapping[str, Callable[[Tensor], QuantizedWeight]] = {
    "fp8": quantize_fp8,
    "int8": quantize_int8,
    "int4": quantize_int4,
}


def cases(*, short: bool) -> list[Callable[[], Case]]:
    """Return functions that create the cases, or only the most informative ones if `short`. Shapes: Llama 3.1 8B."""
    tokens = (1, 4096) if short else (1, 16, 64, 512, 4096)
    makers = [partial(linear_case, name, count, 28672, 4096) for name in _FORMATS for count in tokens]
    makers += [partial(linear_case, name, count, 4096, 14336) for name in _FORMATS for count in tokens if not short]
    makers += [partial(lora_case, 64, 16, 16), partial(lora_case, 4096, 8, 64)]
    return [*attention_cases(short=short), *row_cases(short=short), *makers]


def linear_case(name: str, tokens: int, features: int, inputs: int, device: str = "cuda") -> Case:
    """Return a product with quantized weights; peers: the bf16 product and, for integers, torch's product."""
    hidden = [torch.randn(tokens, inputs, device=device, dtype=_DTYPE) for _ in range(_SETS)]
    weights = [_FORMATS[name](torch.randn(features, inputs, device=device, dtype=_DTYPE)) for _ in range(_SETS)]

    def plain() -> Run:
        dense = [weight.dequantized().to(_DTYPE) for weight in weights]
        return lambda i: hidden[i] @ dense[i].T

    own = {"int8": partial(_torch_int8, hidden, features), "int4": partial(_torch_int4, hidden, features)}
    peers = {"torch bf16": plain, **({f"torch {name}": own[name]} if name in own else {})}
    return Case(
        f"linear {name} {tokens}x{inputs}x{features}",
        lambda i: quantized_linear(hidden[i], weights[i]),
        bytes_moved=_stored(weights[0]) + hidden[0].nbytes + tokens * features * _DTYPE.itemsize,
        flops=2 * tokens * features * inputs,
        peers=peers,
        sets=_SETS,
    )


def lora_case(rows: int, adapters: int, tile_rows: int, size: int = 4096, device: str = "cuda") -> Case:
    """Return LoRA adapters of a square layer, spread evenly over the rows; peer: one product per adapter."""
    plan = LoraPlan(rows, adapters, torch.device(device), tile_rows=tile_rows)
    plan.assign(np.arange(rows) % adapters)
    down = [torch.randn(adapters, _RANK, size, device=device, dtype=_DTYPE) for _ in range(_SETS)]
    up = [torch.randn(adapters, size, _RANK, device=device, dtype=_DTYPE) / size for _ in range(_SETS)]
    hidden = [torch.randn(rows, size, device=device, dtype=_DTYPE) for _ in range(_SETS)]
    out = [torch.zeros(rows, size, device=device, dtype=_DTYPE) for _ in range(_SETS)]

    def reference() -> Run:
        of_adapter = [torch.arange(adapter, rows, adapters, device=device) for adapter in range(adapters)]

        def run(i: int) -> Tensor:
            for adapter, chosen in enumerate(of_adapter):
                low = hidden[i].index_select(0, chosen) @ down[i][adapter].T
                out[i].index_add_(0, chosen, low @ up[i][adapter].T)
            return out[i]

        return run

    return Case(
        f"lora {rows} rows, {adapters} adapters",
        lambda i: add_lora(out[i], hidden[i], LoraWeights(down[i], up[i]), plan),
        bytes_moved=down[0].nbytes + up[0].nbytes + hidden[0].nbytes + 2 * out[0].nbytes,
        flops=4 * rows * _RANK * size,
        peers={"torch": reference},
        sets=_SETS,
    )


def _torch_int8(hidden: list[Tensor], features: int) -> Run:
    device, inputs = hidden[0].device, hidden[0].shape[1]
    weights = [torch.randint(-127, 128, (features, inputs), dtype=torch.int8, device=device) for _ in hidden]
    scale = torch.ones(features, dtype=_DTYPE, device=device)
    return lambda i: torch.ops.aten._weight_int8pack_mm(hidden[i], weights[i], scale)


def _torch_int4(hidden: list[Tensor], features: int, group: int = 128) -> Run:
    device, inputs = hidden[0].device, hidden[0].shape[1]
    shape = (features, inputs // 2)
    raw = [torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in hidden]
    weights = [torch.ops.aten._convert_weight_to_int4pack(words, 8) for words in raw]
    scales = torch.ones(inputs // group, features, 2, dtype=_DTYPE, device=device)
    return lambda i: torch.ops.aten._weight_int4pack_mm(hidden[i], weights[i], group, scales)


def _stored(weight: QuantizedWeight) -> int:
    """Return the bytes of the weight's tensors."""
    values = (getattr(weight, field.name) for field in fields(weight))
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def row_cases(*, short: bool) -> list[Callable[[], Case]]:
    """Return memory-bound kernels that read rows once: norms, gated activations, and sampling from logits."""
    rows = (8192,) if short else (256, 8192)
    makers = (norm_case, add_norm_case, gated_case)
    over_rows = [partial(make, count) for make in makers for count in rows]
    return [*over_rows, partial(gated_case, 8192, activation="gelu_tanh"), partial(sample_case, 256)]


def norm_case(rows: int, size: int = _HIDDEN, device: str = "cuda") -> Case:
    hidden = _sets(rows, size, device)
    norm = Norm(torch.ones(size, device=device, dtype=_DTYPE), 1e-5)
    return Case(
        f"rms_norm {rows}x{size}",
        lambda i: rms_norm(hidden[i], norm),
        bytes_moved=2 * hidden[0].nbytes,
        peers={
            "torch": lambda: lambda i: functional.rms_norm(hidden[i], (size,), norm.weight, norm.eps),
            "torch.compile": lambda: _compiled(partial(rms_norm_reference, norm=norm), hidden),
        },
        sets=_SETS,
    )


def add_norm_case(rows: int, size: int = _HIDDEN, device: str = "cuda") -> Case:
    update, residual = _sets(rows, size, device), _sets(rows, size, device)
    norm = Norm(torch.ones(size, device=device, dtype=_DTYPE), 1e-5)

    def plain(update: Tensor, residual: Tensor) -> Tensor:
        return rms_norm_reference(residual.add_(update), norm)

    return Case(
        f"add_rms_norm {rows}x{size}",
        lambda i: add_rms_norm(update[i], residual[i], norm),
        bytes_moved=4 * update[0].nbytes,
        peers={"torch.compile": lambda: _compiled(plain, update, residual)},
        sets=_SETS,
    )


def gated_case(rows: int, size: int = _INTERMEDIATE, device: str = "cuda", activation: Activation = "silu") -> Case:
    gate_up = _sets(rows, 2 * size, device)
    return Case(
        f"gated {activation} {rows}x{size}",
        lambda i: gated_activation(gate_up[i], activation),
        bytes_moved=gate_up[0].nbytes * 3 // 2,
        peers={"torch.compile": lambda: _compiled(partial(gated_activation_reference, activation=activation), gate_up)},
        sets=_SETS,
    )


def sample_case(rows: int, vocabulary: int = _VOCABULARY, device: str = "cuda") -> Case:
    """Return sampling at temperature 1 without truncation; peer: one multinomial draw from the softmax."""
    logits = [torch.randn(rows, vocabulary, device=device) for _ in range(_SETS)]
    sampling = Sampling(
        temperatures=torch.ones(rows, dtype=torch.float64, device=device),
        seeds=torch.arange(rows, device=device),
        positions=torch.arange(rows, device=device),
    )
    return Case(
        f"sample {rows}x{vocabulary}",
        lambda i: sample(logits[i], sampling),
        bytes_moved=logits[0].nbytes,
        peers={"torch": lambda: lambda i: torch.multinomial(logits[i].softmax(-1), 1)},
        sets=_SETS,
    )


def _compiled(function: Callable[..., Tensor], *sets: list[Tensor]) -> Run:
    compiled: Any = torch.compile(function)
    return lambda i: compiled(*(tensors[i] for tensors in sets))


def _sets(rows: int, size: int, device: str) -> list[Tensor]:
    return [torch.randn(rows, size, device=device, dtype=_DTYPE) for _ in range(_SETS)]
