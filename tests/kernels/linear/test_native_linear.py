"""Our own matrix product: right for every shape, and the same bits for a row whatever rows come with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from updraft.kernels.linear.cpu import NativeEmbedding, NativeLinear, can_pack
from updraft.kernels.linear.ops import pack_linear, pack_linears
from updraft.kernels.runtime.native_library import load
from updraft.protocol.errors import ConfigurationError

DTYPES = [torch.float32, torch.bfloat16]
needs_c = pytest.mark.skipif(load() is None, reason="no C compiler")


def layer(inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


def exact(linear: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    bias = None if linear.bias is None else linear.bias.double()
    return nn.functional.linear(rows.double(), linear.weight.double(), bias)


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(2, 1), (16, 31), (64, 32), (130, 33), (256, 100), (896, 1152), (4096, 48), (4098, 40), (9000, 65)],
)
def test_products(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """Outputs that end inside a panel, sums longer than a block, and every height of a tile."""
    linear = layer(inputs, outputs, dtype, bias=outputs % 2 == 1)
    ours = NativeLinear(linear)
    for count in (*range(1, 26), 95, 287, 288, 289, 600):
        rows = torch.randn(count, inputs).to(dtype)
        got, wanted = ours(rows), exact(linear, rows)
        assert got.shape == (count, outputs) and got.dtype == dtype
        # sums of 1,024 in float32 round by a few units in the last place of the largest; bfloat16 rounds the result
        error = (got.double() - wanted).abs().max() / wanted.abs().max()
        assert error < {torch.float32: 2e-6, torch.bfloat16: 4e-3}[dtype], count


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [256, 4864, 9000])
def test_a_row_has_the_same_bits_whatever_comes_with_it(inputs: int, dtype: torch.dtype) -> None:
    ours = NativeLinear(layer(inputs, 70, dtype, bias=True))
    rows = torch.randn(630, inputs).to(dtype)
    together = ours(rows)
    for start, end in ((0, 1), (629, 630), (3, 5), (280, 291), (100, 411), (7, 303), (11, 24)):
        assert torch.equal(ours(rows[start:end]), together[start:end])


@needs_c
def test_rows_that_lie_apart_and_no_rows_at_all() -> None:
    linear = layer(64, 96, torch.float32, bias=True)
    ours = NativeLinear(linear)
    wide = torch.randn(7, 200)
    for rows in (wide[:, 30:94], torch.randn(64, 7).t(), wide[:, :64][::2]):
        torch.testing.assert_close(ours(rows), linear(rows), rtol=1e-5, atol=1e-5)
    assert ours(torch.empty(0, 64)).shape == (0, 96)


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_propagates(dtype: torch.dtype) -> None:
    ours = NativeLinear(layer(64, 40, dtype, bias=False))
    rows = torch.randn(3, 64).to(dtype)
    rows[1, 5] = torch.nan
    out = ours(rows)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@needs_c
def test_weights_that_are_a_part_of_others() -> None:
    linear = layer(64, 96, torch.float32, bias=False)
    part = nn.Linear(32, 96, bias=False)
    part.weight = nn.Parameter(linear.weight[:, 16:48], requires_grad=False)
    rows = torch.randn(5, 32)
    torch.testing.assert_close(NativeLinear(part)(rows), part(rows), rtol=1e-5, atol=1e-5)


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_crowd_the_cache(dtype: torch.dtype) -> None:
    """They are set apart first: their results are those of the same rows one by one."""
    linear = layer(2048, 64, dtype, bias=True)
    ours, rows = NativeLinear(linear), torch.randn(13, 2048).to(dtype)
    together = ours(rows)
    assert torch.equal(torch.cat([ours(row[None]) for row in rows]), together)
    error = (together.double() - exact(linear, rows)).abs().max() / together.double().abs().max()
    assert error < {torch.float32: 2e-6, torch.bfloat16: 4e-3}[dtype]


@needs_c
@pytest.mark.parametrize("shape", [(4, 32), (4, 66), (2, 3, 64)])
def test_rows_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="64"):
        NativeLinear(layer(64, 32, torch.float32, bias=False))(torch.randn(shape))
    with pytest.raises(ConfigurationError, match="bfloat16"):
        NativeLinear(layer(64, 32, torch.bfloat16, bias=False))(torch.randn(4, 64))


def test_unsupported_inputs() -> None:
    assert not can_pack(torch.empty(4, 3, dtype=torch.bfloat16))  # inputs come in pairs
    assert not can_pack(torch.empty(4, 4, dtype=torch.float16))
    assert not can_pack(torch.empty(4, 4, device="meta"))


@needs_c
def test_the_plain_weights_go() -> None:
    model = nn.Sequential(layer(64, 64, torch.float32, bias=True))
    rows = torch.randn(3, 64)
    wanted = model(rows)
    pack_linears(model)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    torch.testing.assert_close(model(rows), wanted, rtol=1e-5, atol=1e-5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.inner, self.odd = nn.Linear(64, 64), nn.Linear(64, 65)
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = self.inner(rows)
        return self.odd(inner), self.head(inner)


def test_weights_are_packed_where_they_lie() -> None:
    model = Tied().requires_grad_(False)
    rows = torch.randn(5, 64)
    expected, table = model(rows), model.embed.weight.clone()
    memory = model.inner.weight.data_ptr(), model.head.weight.data_ptr()
    pack_linears(model)
    for output, wanted in zip(model(rows), expected, strict=True):
        torch.testing.assert_close(output, wanted)
    assert torch.equal(model.embed(torch.arange(96)), table)
    if isinstance(model.inner, NativeLinear):
        assert (model.inner.weight.data_ptr(), model.head.weight.data_ptr()) == memory
        assert model.embed.weight is model.head.weight


@needs_c
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("outputs", [37, 96, 5000])
def test_packing_keeps_the_rows(outputs: int, dtype: torch.dtype) -> None:
    linear = layer(130, outputs, dtype, bias=False)
    plain = linear.weight.clone()
    embedding = NativeEmbedding(NativeLinear(linear, take_over=True))
    rows = torch.tensor([0, outputs - 1, 17, 17, outputs // 2])
    assert torch.equal(embedding(rows), plain[rows])
    for wrong in (-1, outputs):
        with pytest.raises(IndexError, match=str(outputs)):
            embedding(torch.tensor([0, wrong]))


def test_a_layer_that_nothing_packs_stays() -> None:
    linear = nn.Linear(4, 4).to(torch.float16)
    assert pack_linear(linear) is linear


PROGRAM = """
import torch
from torch import nn
from updraft.kernels.linear.cpu import NativeLinear, is_vectorised_for
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    linear = nn.Linear(130, 37).to(dtype).requires_grad_(False)
    ours = NativeLinear(linear)
    rows = torch.randn(23, 130).to(dtype)
    together = ours(rows)
    wanted = nn.functional.linear(rows.double(), linear.weight.double(), linear.bias.double())
    error = ((together.double() - wanted).abs().max() / wanted.abs().max()).item()
    same = all(torch.equal(ours(rows[i : i + 1]), together[i : i + 1]) for i in range(23))
    print(is_vectorised_for(dtype), error < (1e-6 if dtype == torch.float32 else 4e-3), same)
"""


@needs_c
@pytest.mark.skipif(
    not load() or "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="needs AVX-512 to leave out"
)
@pytest.mark.parametrize(
    ("without", "vectorised"), [("-mno-avx512bf16", (True, False)), ("-mno-avx512f", (False, False))]
)
def test_smaller_processors(without: str, vectorised: tuple[bool, bool], tmp_path: Path) -> None:
    """The same source for those without dot products of bfloat16, and for those with vectors of 256 bits."""
    compiler = f"{os.environ.get('CC') or 'gcc'} {without}"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "UPDRAFT_HOME": str(tmp_path), "CC": compiler},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:2] == [f"{has} True True" for has in vectorised], done.stderr
