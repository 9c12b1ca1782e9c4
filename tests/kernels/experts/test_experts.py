"""Products of rows with their experts: each implementation against a loop over the rows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from updraft.kernels.experts.launch import expert_launch, num_tiles
from updraft.kernels.experts.ops import ExpertLinear, SeparateExperts, routed_experts, separate_experts
from updraft.kernels.experts.reference import group_rows
from updraft.kernels.experts.types import Routing
from updraft.kernels.linear.cpu import NativeLinear
from updraft.kernels.linear.ops import QuantizedLinear, pack_linears
from updraft.kernels.linear.quantization import quantize_fp8, quantize_int4, quantize_int8
from updraft.kernels.runtime.native_library import load
from updraft.protocol.errors import ConfigurationError

torch.set_num_threads(1)
needs_c = pytest.mark.skipif(load() is None, reason="no C compiler")


@dataclass
class Layer:
    """Two layers of experts, the rows that they compute, and their routes."""

    gate_up: ExpertLinear | SeparateExperts
    down: ExpertLinear | SeparateExperts
    hidden: Tensor
    routing: Routing

    def expected(self) -> Tensor:
        """One row and one expert at a time, in float32."""
        assert isinstance(self.gate_up, ExpertLinear) and isinstance(self.down, ExpertLinear)
        out = torch.zeros(len(self.hidden), self.down.weight.shape[1])
        for row, (experts, weights) in enumerate(zip(self.routing.experts, self.routing.weights, strict=True)):
            for expert, weight in zip(experts.tolist(), weights.tolist(), strict=True):
                if expert < self.gate_up.num_experts:
                    gate, up = of_expert(self.gate_up, expert, self.hidden[row].float()).chunk(2)
                    out[row] += weight * of_expert(self.down, expert, functional.silu(gate) * up)
        return out

    def given(self) -> Tensor:
        return routed_experts(self.hidden, self.routing, self.gate_up, self.down, "silu")

    def packed(self) -> Layer:
        """For the C kernel, even where another library would be faster."""
        model = nn.Module()
        model.gate_up, model.down = self.gate_up, self.down
        separate_experts(model)
        parts = [SeparateExperts([NativeLinear(each) for each in part.layers]) for part in (model.gate_up, model.down)]  # type: ignore[arg-type,union-attr]
        return Layer(parts[0], parts[1], self.hidden, self.routing)

    def packed_as_in_a_model(self) -> Layer:
        model = nn.Module()
        model.gate_up, model.down = self.gate_up, self.down
        separate_experts(model)
        pack_linears(model)
        return Layer(model.gate_up, model.down, self.hidden, self.routing)  # type: ignore[arg-type]


def of_expert(layer: ExpertLinear, expert: int, row: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias[expert].float()
    return functional.linear(row, layer.weight[expert].float(), bias)


@torch.no_grad()
def make_layer(
    rows: int, *, experts: int = 6, top_k: int = 2, size: int = 48, neurons: int = 32, bias: bool = False, seed: int = 0
) -> Layer:
    torch.manual_seed(seed)
    gate_up = ExpertLinear((experts, 2 * neurons, size), bias=bias).requires_grad_(False)
    down = ExpertLinear((experts, size, neurons), bias=bias).requires_grad_(False)
    for parameter in (*gate_up.parameters(), *down.parameters()):
        parameter.normal_(std=0.3)
    logits = torch.randn(rows, experts)
    chosen = logits.topk(top_k)
    return Layer(gate_up, down, torch.randn(rows, size), Routing(chosen.indices, chosen.values.softmax(-1)))


@given(st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True), max_size=20))
def test_rows_are_grouped_by_expert(experts: list[list[int]]) -> None:
    chosen = torch.tensor(experts, dtype=torch.int64).view(-1, 2)
    groups = group_rows(Routing(chosen, torch.ones(chosen.shape)), 5)  # expert 5 is another rank's
    starts = groups.starts.tolist()
    assert len(starts) == 6
    for expert in range(5):
        rows = groups.rows[starts[expert] : starts[expert + 1]].tolist()
        assert rows == [row for row, pair in enumerate(experts) if expert in pair]
    pairs = [(row, expert) for row, pair in enumerate(experts) for expert in pair]
    for place, (row, expert) in zip(groups.places.tolist(), pairs, strict=True):
        assert groups.rows[place] == row
        assert expert == 5 or starts[expert] <= place < starts[expert + 1]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
def test_the_reference_is_a_loop_over_rows(rows: int, bias: bool) -> None:
    layer = make_layer(rows, bias=bias)
    torch.testing.assert_close(layer.given(), layer.expected(), rtol=1e-5, atol=1e-5)


@needs_c
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
@pytest.mark.parametrize("size", [48, 50])
def test_experts_packed_for_c(rows: int, size: int, bias: bool) -> None:
    layer = make_layer(rows, bias=bias, size=size)
    expected, packed = layer.expected(), layer.packed()
    torch.testing.assert_close(packed.given(), expected, rtol=1e-5, atol=1e-5)
    assert isinstance(packed.gate_up, SeparateExperts)
    assert packed.gate_up._native is not None, "one call computes all experts"
    torch.testing.assert_close(layer.packed_as_in_a_model().given(), expected, rtol=1e-5, atol=1e-5)


@needs_c
def test_experts_without_rows_are_not_read() -> None:
    layer = make_layer(1)
    used = set(layer.routing.experts.flatten().tolist())
    for stacked in (layer.gate_up, layer.down):
        assert isinstance(stacked, ExpertLinear)
        for expert in set(range(6)) - used:
            stacked.weight.data[expert] = torch.nan
    packed = layer.packed()
    assert isinstance(packed.gate_up, SeparateExperts)
    packed.given()
    assert packed.gate_up._native is not None
    packed.gate_up._native._addresses[next(iter(set(range(6)) - used))] = None
    assert packed.given().isfinite().all()


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4, quantize_fp8])
def test_quantized_experts(quantize) -> None:
    layer = make_layer(20, size=128, neurons=64)
    packed: list[SeparateExperts] = []
    for stacked in (layer.gate_up, layer.down):
        assert isinstance(stacked, ExpertLinear)
        weights = [quantize(each) for each in stacked.weight]
        stacked.weight.data = torch.stack([weight.dequantized() for weight in weights])
        packed.append(SeparateExperts([QuantizedLinear(weight, None, torch.float32) for weight in weights]))
        pack_linears(packed[-1])
    given = Layer(packed[0], packed[1], layer.hidden, layer.routing).given()
    expected = layer.expected()
    assert (given - expected).norm() < 1e-5 * expected.norm()


@needs_c
def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    layer = make_layer(30, top_k=3, bias=True).packed()
    together = layer.given()
    for row in range(30):
        routing = Routing(layer.routing.experts[row : row + 1], layer.routing.weights[row : row + 1])
        alone = Layer(layer.gate_up, layer.down, layer.hidden[row : row + 1], routing).given()
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("is_packed", [False, pytest.param(True, marks=needs_c)])
def test_experts_of_other_ranks_add_nothing(is_packed: bool) -> None:
    layer = make_layer(20)
    experts = torch.where(layer.routing.experts < 3, layer.routing.experts + 3, 6)  # this rank has the last three
    layer.routing = Routing(experts, layer.routing.weights * (experts < 6), is_partial=True)
    expected = layer.expected()
    given = (layer.packed() if is_packed else layer).given()
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


@needs_c
def test_rows_that_do_not_fit_are_refused() -> None:
    layer = make_layer(3).packed()
    layer.given()
    for hidden in (torch.randn(3, 40), torch.randn(3, 48).bfloat16()):
        with pytest.raises((ConfigurationError, RuntimeError)):
            Layer(layer.gate_up, layer.down, hidden, layer.routing).given()


class TestTriton:
    """The kernel, interpreted."""

    @pytest.fixture(autouse=True)
    def interpreted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")
        from updraft.kernels.experts import ops

        monkeypatch.setattr(ops, "uses_triton", lambda _: True)
        new_empty = Tensor.new_empty

        def poisoned(*size, **options) -> Tensor:
            """Whatever the kernel does not write is NaN."""
            empty = new_empty(*size, **options)
            return empty.fill_(torch.nan) if empty.is_floating_point() else empty

        monkeypatch.setattr(Tensor, "new_empty", poisoned)

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize(("rows", "experts", "top_k"), [(0, 6, 2), (1, 6, 2), (3, 5, 5), (40, 3, 1), (70, 2, 2)])
    def test_kernel_is_the_reference(self, rows: int, experts: int, top_k: int, bias: bool) -> None:
        layer = make_layer(rows, experts=experts, top_k=top_k, bias=bias)
        torch.testing.assert_close(layer.given(), layer.expected(), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(("size", "neurons"), [(64, 128), (50, 24), (33, 17)])
    def test_float16_and_sizes_of_rows(self, size: int, neurons: int) -> None:
        layer = make_layer(50, size=size, neurons=neurons, bias=True)
        expected = layer.expected()
        for each in (layer.gate_up, layer.down):
            each.half()
        layer.hidden = layer.hidden.half()
        error = (layer.given().float() - expected).norm() / expected.norm()
        assert error < 2e-3

    @settings(deadline=None, max_examples=15)
    @given(rows=st.integers(1, 60), seed=st.integers(0, 99))
    def test_any_distribution_of_rows(self, rows: int, seed: int) -> None:
        layer = make_layer(rows, experts=7, top_k=3, size=16, neurons=16, seed=seed)
        layer.routing = Routing(layer.routing.experts // 2 * 2, layer.routing.weights)  # uneven, and some without rows
        torch.testing.assert_close(layer.given(), layer.expected(), rtol=1e-5, atol=1e-5)

    def test_experts_of_other_ranks(self) -> None:
        test_experts_of_other_ranks_add_nothing(is_packed=False)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.sampled_from([2, 4]))
def test_tiles_suffice_for_any_distribution(counts: list[int], element_bytes: int) -> None:
    launch = expert_launch(max(sum(counts), 1), len(counts), 64, element_bytes)
    height = launch.tiles["BLOCK_TOKENS"]
    assert sum(-(-count // height) for count in counts) <= num_tiles(sum(counts), len(counts), launch)
