"""Products with experts on the device in bfloat16, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from updraft.kernels.experts.ops import ExpertLinear, routed_experts
from updraft.kernels.experts.types import Routing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("experts", "top_k", "size", "neurons"), [(128, 8, 2048, 768), (8, 2, 4096, 1024)])
@pytest.mark.parametrize("rows", [1, 17, 500])
def test_experts(rows: int, experts: int, top_k: int, size: int, neurons: int) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"), torch.no_grad():
        layers = [ExpertLinear(shape, bias=True) for shape in ((experts, 2 * neurons, size), (experts, size, neurons))]
        for parameter in (each for layer in layers for each in layer.parameters()):
            parameter.normal_(std=0.03)
        gate_up, down = (layer.bfloat16() for layer in layers)
        assert gate_up.bias is not None and down.bias is not None
        hidden = torch.randn(rows, size).bfloat16()
        chosen = torch.randn(rows, experts).topk(top_k)
        routing = Routing(chosen.indices, chosen.values.softmax(-1))
        given = routed_experts(hidden, routing, gate_up, down, "silu")
        expected = torch.zeros(rows, size, dtype=torch.float64)
        for slot in range(top_k):
            for expert in range(experts):
                own = (chosen.indices[:, slot] == expert).nonzero()[:, 0]
                joint = hidden[own].double() @ gate_up.weight[expert].double().t() + gate_up.bias[expert].double()
                gate, up = joint.chunk(2, dim=1)
                each = (functional.silu(gate) * up) @ down.weight[expert].double().t() + down.bias[expert].double()
                expected[own] += each * routing.weights[own, slot, None].double()
    assert float((given.double() - expected).norm() / expected.norm()) < 6e-3
