"""Adapters over a batch: the plan's tiles, the reference against dense products, the kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from updraft.kernels.lora.ops import add_lora
from updraft.kernels.lora.reference import add_lora_reference
from updraft.kernels.lora.types import LoraPlan, LoraWeights
from updraft.protocol.errors import ConfigurationError

CPU = torch.device("cpu")


def stacked(ranks: list[int], inputs: int, features: int, dtype: torch.dtype = torch.float32) -> LoraWeights:
    draw = torch.Generator().manual_seed(0)
    return LoraWeights.stacked(
        [
            (
                torch.randn(rank, inputs, generator=draw).to(dtype) / 4,
                torch.randn(features, rank, generator=draw).to(dtype) / 4,
            )
            for rank in ranks
        ]
    )


def planned(adapters: list[int], num_adapters: int, *, max_rows: int | None = None, tile_rows: int = 16) -> LoraPlan:
    plan = LoraPlan(max_rows or max(1, len(adapters)), num_adapters, CPU, tile_rows=tile_rows)
    plan.assign(adapters)
    return plan


def rows_of(plan: LoraPlan) -> dict[int, int]:
    """Row to adapter, read from the tiles as the kernels do."""
    rows: dict[int, int] = {}
    for start, end, adapter in plan.tiles.tolist():
        assert end - start <= plan.tile_rows
        for row in plan.rows[start:end].tolist():
            assert row not in rows
            rows[row] = adapter
    return rows


@given(st.lists(st.integers(-1, 4), max_size=40), st.sampled_from([1, 4, 16]))
def test_every_row_with_an_adapter_is_in_one_tile(adapters: list[int], tile_rows: int) -> None:
    plan = LoraPlan(40, 5, CPU, tile_rows=tile_rows)
    before = plan.rows.data_ptr(), plan.tiles.data_ptr()
    plan.assign([3] * 40)
    plan.assign(adapters)
    assert rows_of(plan) == {row: adapter for row, adapter in enumerate(adapters) if adapter >= 0}
    assert (plan.rows.data_ptr(), plan.tiles.data_ptr()) == before


def test_wrong_input_is_refused() -> None:
    plan = LoraPlan(2, 2, CPU)
    for adapters in ([0, 1, 0], [2], [-2]):
        with pytest.raises(ConfigurationError):
            plan.assign(adapters)
    with pytest.raises(ConfigurationError, match="rank 200"):
        stacked([200], 8, 8)
    with pytest.raises(ConfigurationError, match="is empty"):
        LoraWeights.stacked([])
    weights, plan = stacked([4, 4], 8, 12), planned([0, 1], 2)
    hidden, out = torch.zeros(2, 8), torch.zeros(2, 12)
    for wrong_out, wrong_hidden, wrong_weights in (
        (out[:, :11], hidden, weights),
        (out[:1], hidden, weights),
        (out.half(), hidden, weights),
        (out, hidden, stacked([4], 8, 12)),
        (torch.zeros(12, 2).T, hidden, weights),
    ):
        with pytest.raises(ConfigurationError):
            add_lora(wrong_out, wrong_hidden, wrong_weights, plan)


def test_the_reference_is_the_dense_product_of_each_row() -> None:
    weights = stacked([3, 16, 9], 24, 20)
    adapters = [2, -1, 0, 1, 2, -1]
    hidden, out = torch.randn(6, 24), torch.randn(6, 20)
    expected = out.clone()
    for row, adapter in enumerate(adapters):
        if adapter >= 0:
            expected[row] += weights.up[adapter] @ weights.down[adapter] @ hidden[row]
    add_lora(out, hidden, weights, planned(adapters, 3))
    assert torch.allclose(out, expected, atol=1e-5)


def test_smaller_ranks_are_padded() -> None:
    weights = stacked([3, 20], 8, 8)
    assert weights.down.shape == (2, 32, 8)
    assert weights.up.shape == (2, 8, 32)
    assert not weights.down[0, 3:].any()
    assert not weights.up[0, :, 3:].any()


CASES = {  # adapters of the rows, ranks, inputs, features, rows of the plan
    "one token": ([0], [8], 128, 64, 1),
    "ragged": ([1, -1, 0, 2, 2, 0, -1, 1, 1], [4, 16, 9], 136, 70, 12),
    "nobody": ([-1, -1], [8], 128, 64, 2),
    "empty": ([], [8], 128, 64, 3),
    "a tile and one more": ([0] * 17 + [1] * 16, [8, 8], 64, 32, 33),
    "split": ([1, 0, 1], [16, 32], 1280, 40, 3),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_reference(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from updraft.kernels.lora.triton import add_lora_triton

    adapters, ranks, inputs, features, max_rows = CASES[name]
    weights = stacked(ranks, inputs, features, dtype)
    plan = planned(adapters, len(ranks), max_rows=max_rows)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(max_rows, inputs, generator=generator).to(dtype)
    fused = torch.randn(max_rows, features + 32, generator=generator).to(dtype)
    hidden[[row for row in range(max_rows) if row >= len(adapters) or adapters[row] < 0]] = torch.nan
    expected = fused.clone()
    add_lora_reference(expected[:, 16:-16], hidden, weights, plan.adapters)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan))
    add_lora_triton(fused[:, 16:-16], hidden, weights, plan)
    assert bool(fused.isfinite().all())
    assert float((fused.double() - expected.double()).norm() / expected.double().norm()) < (
        2e-3 if dtype == torch.float16 else 1e-6
    )
    alone = [row for row in range(max_rows) if row >= len(adapters) or adapters[row] < 0]
    assert torch.equal(fused[alone], expected[alone])


def test_long_tiles_agree_with_the_reference() -> None:
    pytest.importorskip("triton")
    from updraft.kernels.lora.triton import add_lora_triton

    weights = stacked([64, 100], 128, 64)
    plan = planned([0] * 50 + [1] * 70, 2, tile_rows=64)
    hidden, out = torch.randn(120, 128), torch.randn(120, 64)
    expected = out.clone()
    add_lora_reference(expected, hidden, weights, plan.adapters)
    add_lora_triton(out, hidden, weights, plan)
    assert torch.allclose(out, expected, rtol=1e-4, atol=1e-4)
