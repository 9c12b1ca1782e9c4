"""Linear layers: packed for this CPU once after loading, and products with quantized weights.

On CPUs with the right vector instructions, Updraft's kernel (decision 025) is faster up to some hundred rows. oneDNN
serves processors with matrix units (AMX), other architectures, and machines without a compiler.

INT8 and INT4 weights are multiplied with unquantized activations (W8A16, W4A16), and so are FP8 weights with several
scales per feature. On a GPU, other FP8 weights are multiplied with activations that are rounded to FP8 token by token,
because tensor cores multiply FP8 with FP8.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ...protocol.errors import ConfigurationError
from ..runtime.backend import uses_triton
from ..runtime.host_memory import release_freed_memory
from ..runtime.numeric import FP8_CAPABILITY
from . import cpu, onednn
from .cpu import NativeEmbedding, NativeLinear
from .cpu_quantized import NativeQuantizedLinear, can_pack_quantized
from .onednn import MIN_ROWS, OneDnnLinear
from .reference import quantized_linear_reference
from .types import Fp8Weight, Int8Weight, QuantizedWeight

PackedLinear = NativeLinear | OneDnnLinear
_CHECKED_ROWS = 40


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight, for activations of `dtype`."""

    bias: Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = weight.shape, dtype
        self._form = type(weight)
        self._tensors = [field.name for field in fields(weight) if field.name != "shape"]
        for name in self._tensors:  # buffers, so that they move with the model
            self.register_buffer(name, getattr(weight, name))
        self.register_buffer("bias", bias)

    @property
    def weight(self) -> QuantizedWeight:
        parts: dict[str, Any] = {name: getattr(self, name) for name in self._tensors}
        if self._form is Fp8Weight:
            parts["shape"] = self.shape
        return self._form(**parts)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (rows, in_features) to (rows, out_features)."""
        product = quantized_linear(hidden, self.weight)
        return product if self.bias is None else product + self.bias


class QuantizedEmbedding(nn.Module):
    """Embeddings that are looked up in a quantized layer, so that no plain copy exists: a tied head, or their own."""

    def __init__(self, head: QuantizedLinear) -> None:
        super().__init__()
        self.head = head

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map (tokens,) int64 to (tokens, in_features)."""
        return self.head.weight.rows(token_ids).dequantized().to(self.head.dtype)


class ReorderedInputs(nn.Module):
    """A packed layer whose columns were reordered: sorts its inputs in the same way."""

    def __init__(self, order: Tensor, layer: NativeQuantizedLinear) -> None:
        super().__init__()
        self.shape, self.dtype = layer.shape, layer.dtype
        self._order, self._layer = order, layer

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (rows, in_features) to (rows, out_features)."""
        return self._layer(hidden.index_select(1, self._order))


def pack_linears(model: nn.Module, *, batch_invariant: bool = False) -> None:
    """Replace every `nn.Linear` and `QuantizedLinear` of a CPU model in place, if its weights can be packed.

    The plain weights are overwritten or freed, unless another layer uses them too. Embeddings that are tied to a head,
    and quantized ones, are looked up in the packed layer if Updraft's kernel packs it. A packed model stays unchanged.
    Raises ConfigurationError if this machine does not support `batch_invariant`.
    """
    own = (parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    owners = Counter(parameter.data_ptr() for parameter in own)
    children = [(parent, *child) for parent in model.modules() for child in parent.named_children()]
    embeddings = {
        child.weight.data_ptr(): (parent, name) for parent, name, child in children if isinstance(child, nn.Embedding)
    }
    kinds = nn.Linear | OneDnnLinear | QuantizedLinear
    places = [(parent, name) for parent, name, child in children if isinstance(child, kinds)]
    lookups = [(parent, name) for parent, name, child in children if isinstance(child, QuantizedEmbedding)]
    shared: dict[int, nn.Module] = {}  # packed layers by the ids of those that they replace
    del children
    for parent, name in places:  # one at a time: each plain matrix is freed before the next is packed
        child = getattr(parent, name)
        if isinstance(child, nn.Linear):
            tied = embeddings.get(child.weight.data_ptr())
            alone = owners[child.weight.data_ptr()] == (1 if tied is None else 2)
            packed = pack_linear(child, batch_invariant=batch_invariant, take_over=alone)
            setattr(parent, name, packed)
            if tied is not None and alone and isinstance(packed, NativeLinear):
                setattr(*tied, NativeEmbedding(packed))
            if isinstance(packed, OneDnnLinear):  # oneDNN made a copy; NativeLinear packs in place
                del child
                release_freed_memory()
        elif isinstance(child, QuantizedLinear):
            shared[id(child)] = shared.get(id(child)) or _packed_quantized(child)
            setattr(parent, name, shared[id(child)])
            del child
            release_freed_memory()
        elif batch_invariant and not child.is_invariant:
            raise ConfigurationError(
                "batch_invariant: another engine packed this model without the option. Load the model again.",
                param="batch_invariant",
            )
    for parent, name in lookups:
        head = getattr(parent, name).head
        if isinstance(head, NativeLinear):
            setattr(parent, name, NativeEmbedding(head))
    if batch_invariant:
        _check_invariance(model)


def pack_linear(linear: nn.Linear, *, batch_invariant: bool = False, take_over: bool = False) -> nn.Module:
    """Return the fastest layer that computes `linear` on this machine; `linear` itself if no layer can pack it.

    `take_over`: the weights of `linear` may be overwritten.
    """
    has_onednn = onednn.can_pack(linear.weight)
    if cpu.can_pack(linear.weight) and (not has_onednn or _beats_onednn(linear.weight, batch_invariant)):
        return NativeLinear(linear, take_over=take_over)
    return OneDnnLinear(linear, batch_invariant=batch_invariant) if has_onednn else linear


def _packed_quantized(layer: QuantizedLinear) -> nn.Module:
    """Return the layer with its weight packed for the C kernel, or the layer itself without that kernel."""
    weight = layer.weight
    if not can_pack_quantized(weight, layer.dtype):
        return layer
    packed = NativeQuantizedLinear(weight, layer.bias, layer.dtype)
    order = _order(weight)
    return packed if order is None else ReorderedInputs(order, packed)


def implementations(linear: nn.Linear) -> list[nn.Module]:
    """Return every layer that computes `linear` on this machine, for comparisons; `linear` if none packs it."""
    layers: list[nn.Module] = []
    if cpu.can_pack(linear.weight):
        layers.append(NativeLinear(linear))
    if onednn.can_pack(linear.weight):
        layers.append(OneDnnLinear(linear))
    return layers or [linear]


def least_rows(model: nn.Module) -> int:
    """Return the minimum efficient batch size of this model's layers. Smaller batches should be padded."""
    return MIN_ROWS if any(isinstance(module, OneDnnLinear) for module in model.modules()) else 1


def quantized_linear(hidden: Tensor, weight: QuantizedWeight) -> Tensor:
    """Return `hidden` (tokens, inputs) times the weight's transpose: (tokens, features) in the dtype of `hidden`.

    On CUDA: float16 or bfloat16, contiguous rows. Below compute capability 8.9, FP8 is dequantized in every call.
    """
    _check_hidden(hidden, weight)
    order = _order(weight)
    if order is not None:
        hidden = hidden.index_select(1, order)
    if not uses_triton(hidden) or (isinstance(weight, Fp8Weight) and not _multiplies_fp8(hidden)):
        return quantized_linear_reference(hidden, weight)
    from .triton import fp8_linear, int4_linear, int8_linear

    if isinstance(weight, Fp8Weight):
        return fp8_linear(hidden, weight)
    if isinstance(weight, Int8Weight):
        return int8_linear(hidden, weight)
    return int4_linear(hidden, weight)


def _order(weight: QuantizedWeight) -> Tensor | None:
    return None if isinstance(weight, Fp8Weight) else weight.order


def _beats_onednn(weight: Tensor, batch_invariant: bool) -> bool:
    """Return whether to prefer Updraft's kernel. oneDNN on matrix units is faster, but not batch-invariant."""
    has_matrix_unit = weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return cpu.is_vectorised_for(weight.dtype) and (batch_invariant or not has_matrix_unit)


def _check_invariance(model: nn.Module) -> None:
    """Raise ConfigurationError if a row's result depends on other rows. Checks one layer of each weight shape."""
    shapes: set[tuple[int, ...]] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear | QuantizedLinear):
            raise ConfigurationError(
                "batch_invariant needs weights on a CPU in float32 or bfloat16, and a C compiler (set CC, or install "
                "gcc) or oneDNN.",
                param="batch_invariant",
            )
        if isinstance(module, PackedLinear) and module.shape not in shapes:
            shapes.add(module.shape)
            _check_rows(module)


def _check_rows(module: PackedLinear) -> None:
    rows = torch.randn(_CHECKED_ROWS, module.shape[1], generator=torch.Generator().manual_seed(0)).to(module.dtype)
    alone = torch.cat([module(row[None]) for row in rows])
    for count in (2, 7, 16, _CHECKED_ROWS):
        if not torch.equal(module(rows[:count]), alone[:count]):
            raise ConfigurationError(
                f"batch_invariant is not supported on this machine: with weights of shape {tuple(module.shape)}, the "
                f"result of a row changes if {count - 1} more rows are computed with it.",
                param="batch_invariant",
            )


def _multiplies_fp8(hidden: Tensor) -> bool:
    return torch.cuda.get_device_capability(hidden.device) >= FP8_CAPABILITY


def _check_hidden(hidden: Tensor, weight: QuantizedWeight) -> None:
    if hidden.ndim != 2 or hidden.shape[1] != weight.shape[1] or not hidden.is_floating_point():
        raise ConfigurationError(
            f"Activations {tuple(hidden.shape)} in {hidden.dtype} do not fit a weight of shape {weight.shape}.",
            param="hidden",
        )
    if hidden.shape[1] > 1 and hidden.stride(1) != 1:
        raise ConfigurationError("Each row of the activations must be contiguous.", param="hidden")
