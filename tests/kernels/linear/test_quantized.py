"""Quantised weights: what they lose, the products with them against the dequantised ones, and how they are cut."""

from __future__ import annotations

import pytest
import torch
from updraft.kernels.linear.launch import MatmulShape, inputs_per_step, matmul_launch, split_k
from updraft.kernels.linear.ops import quantized_linear
from updraft.kernels.linear.quantization import (
    fp8_weight,
    int4_weight,
    int8_weight,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)
from updraft.kernels.linear.reference import quantize_tokens_reference, quantized_linear_reference
from updraft.kernels.linear.types import FP8, Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight
from updraft.protocol.errors import ConfigurationError

H200 = 132  # multiprocessors


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("quantize", "least", "most"),
    [
        (quantize_fp8, 0.01, 0.03),
        (lambda weight: quantize_fp8(weight, per_tensor=True), 0.01, 0.03),
        (quantize_int8, 0.005, 0.01),
        (quantize_int4, 0.09, 0.11),
        (lambda weight: quantize_int4(weight, 64), 0.08, 0.1),
    ],
)
def test_quantisation_error_on_normal_weights(quantize, least: float, most: float) -> None:
    weight = drawn(24, 256)
    quantized = quantize(weight)
    assert quantized.shape == (24, 256)
    assert least < relative(quantized.dequantized(), weight) < most


@pytest.mark.parametrize("group_size", [64, 128])
def test_int4_round_trip_is_exact(group_size: int) -> None:
    """Each value at its own place, with the group's scale: nothing is permuted."""
    values = torch.randint(-8, 8, (3, 2, group_size), generator=torch.Generator().manual_seed(1)).float()
    values[:, :, 5] = -8
    scale = torch.tensor([0.5, -2.0, 3.0])[:, None, None] * torch.tensor([1.0, 4.0])[None, :, None]
    weight = (values * scale).reshape(3, -1)
    assert torch.equal(quantize_int4(weight, group_size).dequantized(), weight)


def test_int8_and_fp8_round_trip_is_exact() -> None:
    values = torch.randint(-127, 128, (4, 32), generator=torch.Generator().manual_seed(1)).float()
    values[:, 3] = 127
    assert torch.allclose(quantize_int8(values * 0.25).dequantized(), values * 0.25, rtol=1e-6)
    exact = torch.tensor([448.0, -2.0, 0.5, 15.0]).repeat(3, 5)
    assert torch.allclose(quantize_fp8(exact * 0.25).dequantized(), exact * 0.25, rtol=1e-6)


def test_one_scale_for_the_tensor_and_padding() -> None:
    weight = drawn(17, 20)
    quantized = quantize_fp8(weight, per_tensor=True)
    assert quantized.data.shape == (32, 32)
    assert quantized.data.dtype == FP8
    assert len(set(quantized.scale[0, :17].tolist())) == 1
    assert quantized.dequantized().shape == (17, 20)


@pytest.mark.parametrize("quantize", [quantize_fp8, quantize_int8, quantize_int4])
def test_zeros_stay_zeros(quantize) -> None:
    assert not quantize(torch.zeros(3, 128)).dequantized().any()


@pytest.mark.parametrize(
    "weight", [quantize_fp8(drawn(9, 128)), quantize_int8(drawn(9, 128)), quantize_int4(drawn(9, 128))]
)
def test_on_a_cpu_the_reference_runs(weight: QuantizedWeight) -> None:
    hidden = drawn(3, 128, seed=2)
    assert torch.equal(quantized_linear(hidden, weight), quantized_linear_reference(hidden, weight))
    assert relative(quantized_linear(hidden, weight), hidden.double() @ weight.dequantized().double().T) < 1e-5


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="multiple of 128"):
        quantize_int4(drawn(4, 192), 128)
    with pytest.raises(ConfigurationError, match="multiple of 64"):
        quantize_int4(drawn(4, 96))
    with pytest.raises(ConfigurationError, match="Groups of 48 inputs"):
        int4_weight(torch.zeros(4, 192, dtype=torch.int8), torch.ones(4, 4))
    with pytest.raises(ConfigurationError, match="group_size"):
        quantize_int4(drawn(4, 192), 96)
    with pytest.raises(ConfigurationError, match="multiple of 16"):
        quantize_int8(drawn(4, 24))
    weight = quantize_int8(drawn(4, 32))
    with pytest.raises(ConfigurationError, match="do not fit"):
        quantized_linear(drawn(3, 16), weight)
    with pytest.raises(ConfigurationError, match="do not fit"):
        quantized_linear(torch.zeros(3, 32, dtype=torch.int32), weight)
    with pytest.raises(ConfigurationError, match="contiguous"):
        quantized_linear(drawn(32, 3).T, weight)


SHAPES = [  # tokens, features, inputs: one token, borders of tiles, odd sizes, split sums, the larger tiles
    (1, 32, 128),
    (3, 33, 256),
    (16, 64, 1152),
    (17, 70, 384),
    (70, 130, 128),
    (0, 32, 128),
]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full of NaN."""

    def filled(make):
        def poison(*args, **kwargs):
            fresh = make(*args, **kwargs)
            return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh

        return poison

    monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty", filled(torch.empty))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_integer_kernels_agree_with_the_reference(shape: tuple[int, int, int], dtype: torch.dtype, bits: int) -> None:
    pytest.importorskip("triton")
    from updraft.kernels.linear import triton as quantized_triton

    tokens, features, inputs = shape
    hidden = drawn(tokens, inputs + 16, seed=3).to(dtype)[:, :inputs]
    weight = drawn(features, inputs)
    if bits == 8:
        quantized: Int8Weight | Int4Weight = quantize_int8(weight)
        output = quantized_triton.int8_linear(hidden, quantized)
    else:
        quantized = quantize_int4(weight)
        output = quantized_triton.int4_linear(hidden, quantized)
    assert output.dtype == dtype
    assert output.shape == (tokens, features)
    if tokens:
        exact = hidden.double() @ quantized.dequantized().double().T
        assert relative(output, exact) < (1e-3 if dtype == torch.float16 else 1e-6)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "features", "inputs"), [(1, 32, 256), (3, 33, 768), (70, 130, 256)])
@pytest.mark.parametrize(("bits", "group"), [(8, 16), (8, 128), (4, 16), (4, 32), (4, 64), (4, 256), ("fp8", 64)])
def test_kernels_with_groups_and_zeros(
    tokens: int, features: int, inputs: int, bits: int | str, group: int, dtype: torch.dtype
) -> None:
    pytest.importorskip("triton")
    from updraft.kernels.linear import triton as quantized_triton

    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(inputs // group, features, generator=generator) * 0.1 + 0.01
    hidden = drawn(tokens, inputs, seed=3).to(dtype)
    quantized: QuantizedWeight
    if isinstance(bits, str):
        quantized = fp8_weight(drawn(features, inputs).to(FP8), scale)
        output = quantized_triton.fp8_linear(hidden, quantized)
    else:
        limits = -(1 << bits - 1), 1 << bits - 1
        numbers = torch.randint(*limits, (features, inputs), generator=generator, dtype=torch.int8)
        zero = torch.randint(*limits, scale.shape, generator=generator, dtype=torch.int8)
        if bits == 8:
            quantized = int8_weight(numbers, scale, zero)
            output = quantized_triton.int8_linear(hidden, quantized)
        else:
            quantized = int4_weight(numbers, scale, zero)
            output = quantized_triton.int4_linear(hidden, quantized)
    exact = hidden.double() @ quantized.dequantized().double().T
    assert relative(output, exact) < (1e-3 if dtype == torch.float16 else 2e-6)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "features", "inputs"), [(1, 32, 256), (3, 33, 768), (70, 130, 256)])
@pytest.mark.parametrize(("bits", "group"), [(8, 16), (8, 32), (4, 32), (8, 256), (4, 256)])
@pytest.mark.parametrize(("minima", "factors"), [(True, False), (False, True), (True, True)])
def test_kernels_with_minima_and_factors(
    tokens: int, features: int, inputs: int, bits: int, group: int, minima: bool, factors: bool, dtype: torch.dtype
) -> None:
    pytest.importorskip("triton")
    from updraft.kernels.linear import triton as quantized_triton

    if factors and group == 256:
        pytest.skip("a factor belongs to several groups")
    generator = torch.Generator().manual_seed(0)
    first = 0 if minima else -(1 << bits - 1)
    numbers = torch.randint(first, first + (1 << bits - 1), (features, inputs), generator=generator, dtype=torch.int8)
    groups = inputs // group

    def term(name: str) -> dict[str, torch.Tensor]:
        if not factors:
            return {name: torch.rand(groups, features, generator=generator).half()}
        factor = torch.rand(inputs // 256, features, generator=generator).half() * 0.01
        return {name: torch.randint(-32, 64, (groups, features), generator=generator).char(), f"{name}_factor": factor}

    terms = term("scale") | (term("minimum") if minima else {})
    hidden = drawn(tokens, inputs + 16, seed=3).to(dtype)[:, :inputs]
    if bits == 8:
        quantized: Int8Weight | Int4Weight = int8_weight(numbers, **terms)
        output = quantized_triton.int8_linear(hidden, quantized)
    else:
        quantized = int4_weight(numbers, **terms)
        output = quantized_triton.int4_linear(hidden, quantized)
    exact = hidden.double() @ quantized.dequantized().double().T
    assert relative(output, exact) < (1e-3 if dtype == torch.float16 else 2e-6)


@pytest.mark.parametrize("group_size", [64, 128])
def test_every_value_of_four_bits_is_exact(group_size: int) -> None:
    """A token that is 1 at one input and 0 elsewhere reads one column of the weight."""
    pytest.importorskip("triton")
    from updraft.kernels.linear import triton as quantized_triton

    values = torch.arange(16).repeat(16, group_size // 16) - 8.0
    values = torch.stack([row.roll(index) for index, row in enumerate(values)])
    for dtype in (torch.float16, torch.float32):
        output = quantized_triton.int4_linear(torch.eye(group_size, dtype=dtype), quantize_int4(values, group_size))
        assert torch.equal(output.T.float(), values)


def test_the_order_of_a_split_sum_is_fixed() -> None:
    pytest.importorskip("triton")
    from updraft.kernels.linear import triton as quantized_triton

    hidden, weight = drawn(2, 2048, seed=5).half(), quantize_int8(drawn(16, 2048))
    product = MatmulShape(2, 16, 16)
    launch = matmul_launch(2)
    assert split_k(product, launch, quantized_triton._SMALL_GPU).count > 1
    assert torch.equal(quantized_triton.int8_linear(hidden, weight), quantized_triton.int8_linear(hidden, weight))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("inputs", [16, 40, 300])
def test_tokens_become_fp8_as_in_the_reference(inputs: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from updraft.kernels.linear.triton import quantize_tokens

    hidden = drawn(5, inputs, seed=4).to(dtype)
    hidden[2] = 0
    hidden[3] *= 100
    data, scale = quantize_tokens(hidden)
    expected, expected_scale = quantize_tokens_reference(hidden)
    assert torch.allclose(scale, expected_scale, rtol=1e-6)
    assert data.shape == expected.shape == (5, -(-inputs // 16) * 16)
    # The interpreter loses the carry of what rounds up to a power of two, rounds the smallest numbers down, and rounds
    # ties away from zero.
    mantissas, _ = torch.frexp(expected.float().abs())
    judged = (mantissas != 0.5) & ((expected.float().abs() >= 2.0**-6) | (expected.float() == 0))
    assert judged.float().mean() > 0.8
    actual, right = data.float()[judged], expected.float()[judged]
    assert (actual != right).float().mean() < 0.03
    assert torch.allclose(actual, right, rtol=1 / 8)


def test_no_tokens_become_no_fp8() -> None:
    pytest.importorskip("triton")
    from updraft.kernels.linear.triton import quantize_tokens

    data, scale = quantize_tokens(torch.empty(0, 24))
    assert (data.shape, scale.shape) == ((0, 32), (0,))


def test_fp8_products_get_operands_they_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns in multiples of 16 with a scale each, whatever the layer's size; the padding is cut off."""
    pytest.importorskip("triton")
    from updraft.kernels.linear import triton as quantized_triton

    def product(left, right, *, scale_a, scale_b, out_dtype):
        assert left.shape[1] % 16 == 0 and right.shape[0] == left.shape[1] and right.shape[1] % 16 == 0
        assert right.stride(0) == 1 and left.stride(1) == 1
        assert scale_a.shape == (len(left), 1) and scale_b.shape == (1, right.shape[1])
        return (left.float() * scale_a @ (right.float() * scale_b)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    numbers = torch.tensor([1.75, -1.0, 0.5, -1.5])  # a row's scale is 2**-8, and none of them is rounded
    hidden, weight = numbers.repeat(3, 10), quantize_fp8(drawn(21, 40, seed=1))
    assert isinstance(weight, Fp8Weight)
    output = quantized_triton.fp8_linear(hidden, weight)
    assert output.shape == (3, 21)
    assert relative(output, quantized_linear_reference(hidden, weight)) < 0.005


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65, 4096])
@pytest.mark.parametrize("features", [16, 1024, 4096, 128256])
@pytest.mark.parametrize("steps", [1, 3, 32, 112])
def test_every_step_is_in_one_part(tokens: int, features: int, steps: int) -> None:
    product = MatmulShape(tokens, features, steps)
    launch = matmul_launch(tokens)
    split = split_k(product, launch, H200)
    assert (split.count - 1) * split.steps < steps <= split.count * split.steps
    assert split.count == 1 or split.steps >= 4


def test_few_tiles_are_split_until_the_gpu_is_full() -> None:
    def count(tokens: int, features: int) -> int:
        product = MatmulShape(tokens, features, 64)
        return split_k(product, matmul_launch(tokens), H200).count

    assert count(1, 4096) * 128 >= 4 * 132  # 128 tiles
    assert count(1, 128256) == 1
    assert count(4096, 4096) == 1


def test_a_step_divides_the_inputs() -> None:
    assert [inputs_per_step(inputs, 1) for inputs in (4096, 192, 96, 48)] == [128, 64, 32, 16]
    assert inputs_per_step(4096, 17) == 64
