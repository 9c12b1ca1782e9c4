"""On a GPU: adapters in bfloat16 and float16 against float64, and a graph that follows the plan."""

from __future__ import annotations

import pytest
import torch
from device_waits import forbid_device_waits
from updraft.kernels.lora.ops import add_lora
from updraft.kernels.lora.types import LoraPlan, LoraWeights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
CUDA = torch.device("cuda")


def stacked(ranks: list[int], inputs: int, features: int, dtype: torch.dtype) -> LoraWeights:
    draw = torch.Generator().manual_seed(0)
    return LoraWeights.stacked(
        [
            (
                (torch.randn(rank, inputs, generator=draw) / inputs**0.5).to(dtype).cuda(),
                torch.randn(features, rank, generator=draw).to(dtype).cuda(),
            )
            for rank in ranks
        ]
    )


def adapters_of(rows: int, adapters: int, seed: int = 0) -> list[int]:
    return torch.randint(-1, adapters, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()


def added(hidden: torch.Tensor, weights: LoraWeights, adapters: list[int]) -> torch.Tensor:
    """The adapters' sum, in float64, row by row."""
    result = hidden.new_zeros(len(hidden), weights.up.shape[1], dtype=torch.float64)
    for row, adapter in enumerate(adapters):
        if adapter >= 0:
            result[row] = weights.up[adapter].double() @ (weights.down[adapter].double() @ hidden[row].double())
    return result


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("rows", "ranks", "tile_rows"), [(1, [8], 16), (64, [16, 8, 64, 32], 16), (1500, [16] * 8, 64), (200, [128, 4], 64)]
)
def test_lora_delta_agrees_with_float64(rows: int, ranks: list[int], tile_rows: int, dtype: torch.dtype) -> None:
    weights = stacked(ranks, 1024, 1536, dtype)
    adapters = [0] if rows == 1 else adapters_of(rows, len(ranks))
    plan = LoraPlan(rows + 5, len(ranks), CUDA, tile_rows=tile_rows)
    plan.assign(adapters)
    hidden, out = torch.randn(rows, 1024, device=CUDA, dtype=dtype), torch.zeros(rows, 1536, device=CUDA, dtype=dtype)
    add_lora(out, hidden, weights, plan)
    expected = added(hidden, weights, adapters)
    assert float((out.double() - expected).norm() / expected.norm()) < ROUNDING[dtype]
    assert not out[torch.tensor(adapters, device=CUDA) < 0].any()


def test_a_graph_follows_the_plan_and_nothing_waits() -> None:
    weights = stacked([16, 16, 16], 512, 256, torch.bfloat16)
    plan = LoraPlan(32, 3, CUDA)
    hidden, out = torch.randn(32, 512, device=CUDA).bfloat16(), torch.zeros(32, 256, device=CUDA).bfloat16()
    plan.assign(adapters_of(32, 3))
    add_lora(out, hidden, weights, plan)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_lora(out, hidden, weights, plan)
    for seed, rows in ((1, 32), (2, 7), (3, 0)):
        adapters = adapters_of(rows, 3, seed)
        out.zero_()
        with forbid_device_waits():
            plan.assign(adapters)
            graph.replay()
        expected = added(hidden, weights, adapters)
        assert float((out.double() - expected).norm()) <= 5e-3 * float(expected.norm())
