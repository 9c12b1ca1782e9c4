"""The C kernel for quantised weights: right in every format, and the same bits for a row whatever rows come with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from updraft.kernels.linear.cpu import NativeEmbedding, NativeLinear
from updraft.kernels.linear.cpu_quantized import NativeQuantizedLinear, can_pack_quantized
from updraft.kernels.linear.ops import QuantizedLinear, ReorderedInputs, pack_linears
from updraft.kernels.linear.quantization import fp8_weight, int4_weight, int8_weight, quantize_fp8, quantize_int8
from updraft.kernels.linear.types import FP8, QuantizedWeight
from updraft.kernels.runtime.native_library import load
from updraft.protocol.errors import ConfigurationError

DTYPES = [torch.float32, torch.bfloat16]
needs_c = pytest.mark.skipif(load() is None, reason="no C compiler")
SHAPES = [(1, 64), (31, 128), (33, 768), (100, 2048), (65, 4864)]
KINDS = {
    "int8": (8, 1, False),
    "int8 groups": (8, 4, False),
    "int8 zeros": (8, 4, True),
    "int4": (4, 2, False),
    "int4 zeros": (4, 4, True),
    "int4 channel": (4, 1, True),
    "fp8": (0, 1, False),
    "fp8 groups": (0, 2, False),
    "int8 minima": (8, 4, False),
    "int4 minima": (4, 2, False),
    "int8 factors": (8, 4, False),
    "int4 factors minima": (4, 4, False),
}


def weight(kind: str, outputs: int, inputs: int) -> QuantizedWeight:
    bits, groups, has_zeros = KINDS[kind]
    generator = torch.Generator().manual_seed(outputs + inputs)
    scale = torch.rand(groups, outputs, generator=generator) * 0.1 + 0.01
    if not bits:
        every = torch.arange(256, dtype=torch.uint8).view(FP8)
        numbers = every[every.float().isfinite()][torch.randint(254, (outputs, inputs), generator=generator)]
        return fp8_weight(numbers, scale)
    limits = -(1 << bits - 1), 1 << bits - 1

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(*limits, shape, generator=generator, dtype=torch.int8)

    numbers, terms = drawn(outputs, inputs), {}
    if "minima" in kind:
        terms["minimum"] = torch.randn(groups, outputs, generator=generator).half()
        numbers, scale = numbers + (8 if bits == 4 else 0), scale.half()
    if "factors" in kind:
        factors = torch.rand(2, groups // 2, outputs, generator=generator).half() * 0.01
        terms |= {"scale_factor": factors[0], "minimum_factor": factors[1]}
        scale, terms["minimum"] = (torch.randint(-99, 99, scale.shape, generator=generator).char() for _ in range(2))
        terms = terms if "minima" in kind else {"scale_factor": factors[0]}
    make = int8_weight if bits == 8 else int4_weight
    return make(numbers, scale, drawn(groups, outputs) if has_zeros else None, **terms)


@needs_c
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind: str, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    quantized = weight(kind, outputs, inputs)
    bias = torch.randn(outputs) if outputs % 2 else None
    assert can_pack_quantized(quantized, dtype)
    ours = NativeQuantizedLinear(quantized, bias, dtype)
    rows = torch.randn(300, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = rows.double() @ quantized.dequantized().double().t()
    wanted += 0 if bias is None else bias.to(dtype).double()
    together = ours(rows)
    assert together.shape == (300, outputs) and together.dtype == dtype
    error = (together.double() - wanted).norm() / wanted.norm()
    assert error < {torch.float32: 4e-6, torch.bfloat16: 3e-3}[dtype]
    for start, end in ((0, 1), (299, 300), (3, 5), (40, 43), (100, 104), (7, 20), (280, 291), (5, 299)):
        assert torch.equal(ours(rows[start:end]), together[start:end])


@needs_c
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_8_bits_is_exact(dtype: torch.dtype) -> None:
    """A row that is 1 at one input and 0 elsewhere reads one column of the weight."""
    numbers = torch.arange(-128, 128, dtype=torch.int8).repeat(2, 1)
    finite = torch.arange(256, dtype=torch.uint8).view(FP8)
    finite = torch.where(finite.float().isnan(), torch.zeros((), dtype=FP8).float(), finite.float()).to(FP8)
    for quantized in (int8_weight(numbers, torch.ones(1, 2)), fp8_weight(finite.repeat(2, 1), torch.ones(1, 2))):
        out = NativeQuantizedLinear(quantized, None, dtype)(torch.eye(256, dtype=dtype))
        assert torch.equal(out.float(), quantized.dequantized().t())


@needs_c
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_dequantised(kind: str, dtype: torch.dtype) -> None:
    quantized, chosen = weight(kind, 100, 128), torch.tensor([99, 0, 31, 32, 31])
    embedding = NativeEmbedding(NativeQuantizedLinear(quantized, None, dtype))
    rounding = {"rtol": 1e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 2e-6}
    torch.testing.assert_close(embedding(chosen), quantized.dequantized()[chosen].to(dtype), **rounding)
    assert torch.equal(quantized.rows(chosen).dequantized(), quantized.dequantized()[chosen])


@needs_c
@pytest.mark.parametrize("inputs", [2, 20, 2050])
def test_fp8_of_any_even_number_of_inputs(inputs: int) -> None:
    quantized = quantize_fp8(torch.randn(17, inputs, generator=torch.Generator().manual_seed(2)))
    rows = torch.randn(3, inputs)
    out = NativeQuantizedLinear(quantized, None, torch.float32)(rows)
    torch.testing.assert_close(out, rows @ quantized.dequantized().t(), rtol=1e-4, atol=1e-4)


@needs_c
def test_rows_that_lie_apart_and_no_rows_at_all() -> None:
    ours = NativeQuantizedLinear(weight("int4 zeros", 96, 64), None, torch.float32)
    wide = torch.randn(7, 200)
    for rows in (wide[:, 30:94], torch.randn(64, 7).t(), wide[:, :64][::2]):
        torch.testing.assert_close(ours(rows), ours(rows.contiguous()), rtol=0, atol=0)
    assert ours(torch.empty(0, 64)).shape == (0, 96)
    with pytest.raises(ConfigurationError, match="64"):
        ours(torch.randn(2, 32))


@needs_c
def test_layers_of_a_model_are_packed() -> None:
    order = torch.randperm(64)
    reordered = int8_weight(torch.randint(-9, 9, (40, 64), dtype=torch.int8), torch.ones(1, 40), order=order)
    layers = [QuantizedLinear(quantize_int8(torch.randn(64, 64)), torch.randn(64), torch.float32)]
    layers.append(QuantizedLinear(reordered, None, torch.float32))
    model, rows = nn.Sequential(*layers), torch.randn(5, 64)
    expected = model(rows)
    pack_linears(model, batch_invariant=True)
    assert [type(layer) for layer in model] == [NativeQuantizedLinear, ReorderedInputs]
    assert isinstance(model[0], NativeLinear)
    torch.testing.assert_close(model(rows), expected, rtol=1e-4, atol=1e-4)
    packed = model[0]
    pack_linears(model)
    assert model[0] is packed


def test_columns_in_another_order_are_multiplied_with_their_inputs() -> None:
    numbers, order = torch.randint(-9, 9, (40, 64), dtype=torch.int8), torch.randperm(64)
    layer = QuantizedLinear(int8_weight(numbers[:, order], torch.ones(1, 40), order=order), None, torch.float32)
    rows = torch.randn(5, 64)
    torch.testing.assert_close(layer(rows), rows @ numbers.float().t(), rtol=1e-4, atol=1e-4)


def test_layers_that_nothing_packs_stay() -> None:
    model = nn.Sequential(QuantizedLinear(quantize_fp8(torch.randn(16, 16)), None, torch.float16))
    rows = torch.randn(3, 16).half()
    wanted = model(rows)
    pack_linears(model)
    assert isinstance(model[0], QuantizedLinear) and torch.equal(model(rows), wanted)
    with pytest.raises(ConfigurationError, match="batch_invariant"):
        pack_linears(model, batch_invariant=True)
    assert not can_pack_quantized(quantize_fp8(torch.randn(16, 15)), torch.bfloat16)


def test_layers_move_with_the_model() -> None:
    layer = QuantizedLinear(quantize_int8(torch.randn(16, 32)), torch.randn(16), torch.float32).to("meta")
    assert {layer.weight.scale.device.type, layer.get_buffer("bias").device.type} == {"meta"}


PROGRAM = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from test_native_quantized import DTYPES, KINDS, weight
from updraft.kernels.linear.cpu_quantized import NativeQuantizedLinear
for dtype in DTYPES:
    for kind in KINDS:
        quantized = weight(kind, 37, 128)
        ours, rows = NativeQuantizedLinear(quantized, None, dtype), torch.randn(23, 128).to(dtype)
        together, wanted = ours(rows), rows.double() @ quantized.dequantized().double().t()
        error = ((together.double() - wanted).norm() / wanted.norm()).item()
        same = all(torch.equal(ours(rows[i : i + 1]), together[i : i + 1]) for i in range(23))
        assert error < (4e-6 if dtype == torch.float32 else 4e-3) and same, (dtype, kind, error, same)
"""


@needs_c
@pytest.mark.skipif(
    not load() or "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="needs AVX-512 to leave out"
)
@pytest.mark.parametrize("without", ["-mno-avx512bf16", "-mno-avx512f"])
def test_smaller_processors(without: str, tmp_path: Path) -> None:
    """The same source for processors without dot products of bfloat16, and for those with vectors of 256 bits."""
    compiler = f"{os.environ.get('CC') or 'gcc'} {without}"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parent)],
        env={**os.environ, "UPDRAFT_HOME": str(tmp_path), "CC": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
