"""Hardware ceilings: memory bandwidth, matmul speed, and the time of a model's matrix products alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn

from ...cloud_engine.engine.worker.cuda_graphs import CudaRecorder
from ...cloud_engine.models.decoder import Decoder
from ...kernels.linear.ops import implementations


class MatrixProducts:
    """The matrix products of a model, without the rest of its computation, in the fastest available implementation.

    `weight_bytes`: bytes of weights that one decoding step reads. `flops_per_token`: operations per token, without the
    output head, because a prompt needs the head only for its last token.
    """

    def __init__(self, model: Decoder) -> None:
        self.weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        if not model.config.tie_word_embeddings:
            self.weight_bytes -= model.embed_tokens.weight.nbytes  # a step reads only a few rows of the embeddings
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self._dtype, self._device = model.embed_tokens.weight.dtype, model.embed_tokens.weight.device
        self._layers = [
            (module.in_features, implementations(module)) for module in linears if module is not model.lm_head
        ]
        self._head = model.config.hidden_size, implementations(model.lm_head)
        self.flops_per_token = sum(2 * m.in_features * m.out_features for m in linears if m is not model.lm_head)

    @torch.inference_mode()
    def seconds(self, steps: Sequence[tuple[int, int]]) -> float:
        """Return the total seconds of `steps`, pairs of (rows in layers, rows in head). Equal steps are timed once."""
        layers, head = (cache(partial(self._time, part)) for part in (self._layers, [self._head]))
        return sum(layers(rows) + (head(samples) if samples else 0.0) for rows, samples in steps)

    def _time(self, layers: Sequence[tuple[int, list[nn.Module]]], rows: int) -> float:
        inputs = {size: torch.randn(rows, size, device=self._device).to(self._dtype) for size, _ in layers}

        def compute(form: int) -> None:
            for size, forms in layers:
                forms[form](inputs[size])

        computes = [partial(compute, form) for form in range(min(len(forms) for _, forms in layers))]
        if self._device.type == "cuda":  # a CUDA graph, as in the engine, so that the GPU never waits for launches
            record = CudaRecorder()
            computes = [record(compute) for compute in computes]
        return min(_seconds(self._device, compute) for compute in computes * 3)


def memory_bandwidth(device: torch.device, size: int | None = None) -> float:
    """Return the memory bandwidth in bytes per second: the best of five float32 sums that read `size` bytes each."""
    size = size or (2**31 if device.type == "cuda" else 2**29)
    data = torch.ones(size // 4, device=device)
    return max(size / _seconds(device, data.sum) for _ in range(5))


@torch.inference_mode()
def matmul_flops(weight: Tensor, size: int | None = None) -> float:
    """Return the floating-point operations per second of a `size`-cubed matrix product in the dtype and on the device
    of `weight`: the best of five runs of each implementation."""
    size = size or (8192 if weight.is_cuda else 2048)
    layers = implementations(nn.Linear(size, size, bias=False).to(weight).requires_grad_(False))
    rows = torch.randn(size, size).to(weight)
    return max(2 * size**3 / _seconds(weight.device, partial(layer, rows)) for layer in layers * 5)


def _seconds(device: torch.device, compute: Callable[[], object]) -> float:
    """Return the run time of `compute` in seconds. On a GPU, CUDA events exclude the time of launching and waiting."""
    if device.type != "cuda":
        started = time.perf_counter()
        compute()
        return time.perf_counter() - started
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    compute()
    ended.record()
    ended.synchronize()
    return 1e-3 * began.elapsed_time(ended)
