"""On a GPU: products with quantised weights in bfloat16 and float16 against float64, and captured in graphs."""

from __future__ import annotations

import pytest
import torch
from updraft.kernels.linear.ops import quantized_linear
from updraft.kernels.linear.quantization import quantize_fp8, quantize_int4, quantize_int8
from updraft.kernels.linear.reference import quantize_tokens_reference
from updraft.kernels.linear.types import Fp8Weight, QuantizedWeight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FORMATS = {
    "fp8": quantize_fp8,
    "fp8 tensor": lambda weight: quantize_fp8(weight, per_tensor=True),
    "int8": quantize_int8,
    "int4": quantize_int4,
    "int4 in 64": lambda weight: quantize_int4(weight, 64),
}
SHAPES = [(1, 4096, 4096), (16, 4864, 896), (17, 151, 1024), (64, 1024, 3072), (700, 6144, 4096)]
ROUNDING = {torch.bfloat16: 3e-3, torch.float16: 5e-4}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def exact(hidden: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """In float64; with FP8 weights of the rounded activations, where the device multiplies them."""
    left = hidden.double()
    if isinstance(weight, Fp8Weight) and torch.cuda.get_device_capability() >= (8, 9):
        data, scale = quantize_tokens_reference(hidden)
        left = data[:, : hidden.shape[1]].double() * scale.double()[:, None]
    return left @ weight.dequantized().double().T


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_products_agree_with_float64(name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, features, inputs = shape
    weight = FORMATS[name](drawn(features, inputs))
    hidden = drawn(tokens, inputs, seed=1).to(dtype)
    output = quantized_linear(hidden, weight)
    assert (output.dtype, tuple(output.shape)) == (dtype, (tokens, features))
    # FP8 results come as bfloat16, and a few activations round to an adjacent value: divisions differ in the last bit.
    limit = 5e-3 if name.startswith("fp8") else ROUNDING[dtype]
    assert relative(output, exact(hidden, weight)) < limit


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs FP8 tensor cores"
)
def test_tokens_become_fp8_as_in_the_reference() -> None:
    from updraft.kernels.linear.triton import quantize_tokens

    hidden = drawn(300, 4100).bfloat16()
    hidden[7] = 0
    data, scale = quantize_tokens(hidden)
    expected, expected_scale = quantize_tokens_reference(hidden)
    assert torch.allclose(scale, expected_scale, rtol=1e-6)
    assert float((data.float() != expected.float()).double().mean()) < 1e-3


@pytest.mark.parametrize("name", FORMATS)
def test_a_graph_computes_what_its_buffers_hold(name: str) -> None:
    weight = FORMATS[name](drawn(1024, 2048))
    hidden = drawn(8, 2048, seed=1).bfloat16()
    quantized_linear(hidden, weight)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantized_linear(hidden, weight)
    hidden.copy_(drawn(8, 2048, seed=2))
    graph.replay()
    assert torch.equal(captured, quantized_linear(hidden, weight))
