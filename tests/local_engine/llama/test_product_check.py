"""Our matrix products: right to the rounding of float32, and to the bit the same whatever is computed beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st
from updraft.local_engine.llama.library import llama
from updraft.local_engine.llama.product_check import KINDS, Factors, WeightKind, agrees

pytestmark = pytest.mark.skipif(not llama().kernels.types, reason=llama().kernels.reason)
BY_NAME = {kind.name: kind for kind in KINDS}
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def dequantized(factors: Factors) -> tuple[np.ndarray, np.ndarray]:
    """Weights by the gguf library, and activations; float64, a row each."""
    kind, activations = factors.kind, factors.activations
    weights = quants.dequantize(factors.weights.reshape(len(factors.weights), -1), GGMLQuantizationType[kind.name])
    if kind.values == 32:
        columns = quants.dequantize(activations.reshape(len(activations), -1), GGMLQuantizationType.Q8_0)
    else:  # Q8_K: a float32 scale, then the values
        columns = activations[:, :, 4:260].view(np.int8) * activations[:, :, :4].copy().view(np.float32)
    return weights.astype(np.float64), columns.reshape(len(activations), -1).astype(np.float64)


def check(factors: Factors, output: np.ndarray | None, tolerance: float = 2e-7) -> None:
    """Within some roundings of float32 of the exact product."""
    weights, columns = dequantized(factors)
    assert output is not None
    error = np.abs(output - columns @ weights.T)
    assert np.all(error <= tolerance * (np.abs(columns) @ np.abs(weights).T))


sizes = st.tuples(st.integers(16, 50), st.integers(1, 50), st.integers(8, 40))


@given(kind=st.sampled_from(KINDS), size=sizes, threads=st.integers(1, 5))
def test_every_size_is_right(ggml, kind: WeightKind, size: tuple[int, int, int], threads: int):
    rows, columns, blocks = size
    factors = Factors.scrambled(ggml, kind, (rows, columns, blocks if kind.values == 32 else 1 + blocks // 8))
    check(factors, factors.product(ggml.updraft_product, threads))


@given(kind=st.sampled_from(KINDS), size=sizes, data=st.data())
def test_a_row_has_the_same_bits_alone_and_in_company(ggml, kind: WeightKind, size: tuple[int, int, int], data):
    """However many rows there are, and wherever among them it stands; and a row of the matrix, too."""
    factors = Factors.scrambled(ggml, kind, size)
    rows, columns, _ = size
    whole = factors.product(ggml.updraft_product)
    first = data.draw(st.integers(0, columns - 1))
    some = replace(factors, activations=factors.activations[first : data.draw(st.integers(first + 1, columns))])
    of_matrix = data.draw(st.integers(0, rows - 16))
    some = replace(some, weights=factors.weights[of_matrix:].copy())
    output = some.product(ggml.updraft_product, data.draw(st.integers(1, 4)))
    assert whole is not None
    assert output is not None
    assert np.array_equal(output.view(np.int32), whole[first : first + len(output), of_matrix:].copy().view(np.int32))


@kinds
@pytest.mark.parametrize("size", [(32, 200, 90), (20, 600, 16), (16, 50, 150)])
def test_products_larger_than_the_buffer_are_split(ggml, kind: WeightKind, size: tuple[int, int, int]) -> None:
    factors = Factors.scrambled(ggml, kind, size)
    check(factors, factors.product(ggml.updraft_product))


@kinds
def test_extreme_values_are_right(ggml, kind: WeightKind) -> None:
    """All bits of the weights' values set, or none, beside the largest activations of either sign."""
    for byte in (0, 255):
        for sign in (-1, 1):
            factors = Factors.scrambled(ggml, kind, (16, 3, 8))
            scales = [place + half for place in kind.halves_at for half in (0, 1)]
            kept = factors.weights[:, :, scales].copy()
            factors.weights[:] = byte
            factors.weights[:, :, scales] = kept
            values = slice(2, 34) if kind.values == 32 else slice(4, 260)
            factors.activations[:, :, values] = np.int8(127 * sign).view(np.uint8)
            if kind.values == 256:
                sums = np.full(16, 16 * 127 * sign, np.int16)
                factors.activations[:, :, 260:] = sums.view(np.uint8)
            check(factors, factors.product(ggml.updraft_product), 4e-6)  # sums that only grow round one way


def test_unsupported_shapes_are_declined(ggml) -> None:
    """Few rows in the matrix, short ones as of tiny models, and ones longer than any: ggml computes these."""
    sizes = {"Q8_0": [(15, 2, 8), (16, 2, 7), (16, 1, 14000)], "Q6_K": [(15, 2, 1), (16, 1, 1700)]}
    for name, declined in sizes.items():
        for size in declined:
            assert Factors.scrambled(ggml, BY_NAME[name], size).product(ggml.updraft_product) is None


@kinds
def test_wrong_results_do_not_agree(ggml, kind: WeightKind, monkeypatch: pytest.MonkeyPatch) -> None:
    assert agrees(ggml, kind)
    dots = Factors.dots
    monkeypatch.setattr(Factors, "dots", lambda factors, *to: dots(factors, *to) * np.float32(1.0001))
    assert not agrees(ggml, kind)
