"""What the machine allows: memory bandwidth, matmul speed, and the time of a model's matrix products alone."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..cloud_engine.models.decoder import Decoder
from ..kernels.packed_linear import forms


class MatrixProducts:
    """The linear layers of a model, in every form there is here, and nothing else of it: the fastest counts.

    `weight_bytes`: what a decoding step has to read. `flops_per_token`: of the layers; the head is not among them, as a
    prompt needs it once.
    """

    def __init__(self, model: Decoder) -> None:
        self.weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        if not model.config.tie_word_embeddings:
            self.weight_bytes -= model.embed_tokens.weight.nbytes  # one row of it is read
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self._dtype, self._device = model.embed_tokens.weight.dtype, model.embed_tokens.weight.device
        self._layers = [(module.in_features, forms(module)) for module in linears if module is not model.lm_head]
        self._head = model.config.hidden_size, forms(model.lm_head)
        self.flops_per_token = sum(2 * m.in_features * m.out_features for m in linears if m is not model.lm_head)

    @torch.inference_mode()
    def seconds(self, steps: Sequence[tuple[int, int]]) -> float:
        """Of all products in `steps`: (rows through the layers, rows through the head) each. Sizes are timed once."""
        timed: dict[tuple[bool, int], float] = {}

        def time_of(is_head: bool, rows: int) -> float:
            if (is_head, rows) not in timed:
                layers = [self._head] if is_head else self._layers
                timed[is_head, rows] = self._time(layers, rows)
            return timed[is_head, rows]

        return sum(time_of(False, rows) + (time_of(True, samples) if samples else 0.0) for rows, samples in steps)

    def _time(self, layers: Sequence[tuple[int, list[nn.Module]]], rows: int) -> float:
        inputs = {size: torch.randn(rows, size, device=self._device).to(self._dtype) for size, _ in layers}
        best = float("inf")
        for _ in range(3):
            for form in range(min(len(found) for _, found in layers)):
                started = time.perf_counter()
                for size, found in layers:
                    found[form](inputs[size])
                _wait(self._device)
                best = min(best, time.perf_counter() - started)
        return best


def memory_bandwidth(device: torch.device, size: int = 2**29) -> float:
    """Bytes per second that a sum over float32 reads, the best of five."""
    data = torch.ones(size // 4, device=device)
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        data.sum()
        _wait(device)
        best = max(best, size / (time.perf_counter() - started))
    return best


@torch.inference_mode()
def matmul_flops(weight: Tensor, size: int = 2048) -> float:
    """Floating-point operations per second of a square product in `weight`'s dtype, where it is: of the fastest form,
    the best of five."""
    layers = forms(nn.Linear(size, size, bias=False).to(weight).requires_grad_(False))
    rows = torch.randn(size, size).to(weight)
    best = 0.0
    for layer in layers * 5:
        started = time.perf_counter()
        layer(rows)
        _wait(weight.device)
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
