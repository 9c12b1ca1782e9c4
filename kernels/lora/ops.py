"""Low-rank adapters over a batch in which every token may use a different adapter (Hu et al. 2021)."""

from __future__ import annotations

from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..runtime.backend import uses_triton
from .reference import add_lora_reference
from .types import LoraPlan, LoraWeights


def add_lora(out: Tensor, hidden: Tensor, weights: LoraWeights, plan: LoraPlan) -> None:
    """Add up[adapter] @ (down[adapter] @ hidden[row]) to out[row] in place, for each row of the plan with an adapter.

    `out` (rows, features) may be part of a fused projection's output; `hidden` is (rows, inputs). Rows are contiguous,
    in the dtype of the weights. The float32 sums over the inputs are rounded to this dtype at the end.
    """
    _check(out, hidden, weights, plan)
    if uses_triton(hidden):
        from .triton import add_lora_triton

        add_lora_triton(out, hidden, weights, plan)
    else:
        add_lora_reference(out, hidden, weights, plan.adapters)


def _check(out: Tensor, hidden: Tensor, weights: LoraWeights, plan: LoraPlan) -> None:
    adapters, rank, inputs = weights.down.shape
    if weights.up.shape != (adapters, out.shape[-1], rank) or hidden.shape[-1] != inputs:
        raise ConfigurationError(
            f"Adapters of {tuple(weights.down.shape)} and {tuple(weights.up.shape)} do not fit inputs "
            f"{tuple(hidden.shape)} and outputs {tuple(out.shape)}.",
            param="weights",
        )
    if adapters < plan.num_adapters or len(plan.adapters) > min(len(out), len(hidden)):
        raise ConfigurationError("The LoRA plan does not fit the rows or names more adapters than given.", param="plan")
    if not hidden.dtype == out.dtype == weights.down.dtype == weights.up.dtype:
        fault = f"Adapters in {weights.down.dtype} do not fit data in {hidden.dtype} and {out.dtype}."
        raise ConfigurationError(fault, param="weights")
    if hidden.stride(-1) != 1 or out.stride(-1) != 1:
        raise ConfigurationError("Each row of activations must be contiguous.", param="hidden")
