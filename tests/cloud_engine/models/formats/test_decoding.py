"""Single layers in every checkpoint format: the decoded weight is that of the format's library or specification."""

from __future__ import annotations

import pytest
import torch
from quantized_checkpoints import KINDS, block_fp8
from updraft.cloud_engine.models.fields import Fields
from updraft.cloud_engine.models.formats import formats_of
from updraft.cloud_engine.models.formats.format import StoredWeight, joined, order_of, spread
from updraft.kernels.linear.ops import quantized_linear
from updraft.protocol.errors import ModelLoadError


def decoded(name: str, outputs: int, inputs: int) -> tuple[StoredWeight, torch.Tensor]:
    """The decoded weight, and the plain weight that it stands for."""
    kind = KINDS[name]()
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    stored = kind.store(weight)
    forms = formats_of(Fields({"quantization_config": kind.config}, "config.json"))
    form = next(form for form in forms if set(form.required) <= stored.tensors.keys())
    assert stored.tensors.keys() <= {*form.required, *form.optional, *form.ignored}
    return form.decode(stored.tensors, inputs), stored.weight


@pytest.mark.parametrize("name", KINDS)
def test_layers(name: str) -> None:
    stored, plain = decoded(name, 192, 384)
    packed = stored.pack()
    assert packed.shape == (192, 384)
    order = slice(None) if stored.order is None else stored.order
    torch.testing.assert_close(packed.dequantized(), plain[:, order].float(), rtol=1e-6, atol=1e-6)
    hidden = torch.randn(3, 384)
    torch.testing.assert_close(quantized_linear(hidden, packed), hidden @ plain.float().t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("outputs", "inputs"), [(200, 320), (128, 64), (130, 1040), (33, 16)])
def test_blocks_at_the_border_are_smaller(outputs: int, inputs: int) -> None:
    stored = block_fp8().store(torch.randn(outputs, inputs))
    (form,) = formats_of(Fields({"quantization_config": block_fp8().config}, "config.json"))
    weight = form.decode(stored.tensors, inputs).pack()
    torch.testing.assert_close(weight.dequantized(), stored.weight, rtol=1e-6, atol=0)


def test_parts_join_if_they_are_alike() -> None:
    (first, plain), (second, other) = decoded("int-channel", 32, 64), decoded("int-asymmetric", 48, 64)
    whole = joined([first, second]).pack()
    torch.testing.assert_close(whole.dequantized(), torch.cat([plain, other]).float(), rtol=1e-6, atol=1e-6)
    with pytest.raises(ModelLoadError, match="quantized alike"):
        joined([first, decoded("pack-4-group", 32, 64)[0]])
    with pytest.raises(ModelLoadError, match="quantized alike"):
        joined([decoded("gptq-4-32", 32, 64)[0], decoded("gptq-4-order", 32, 64)[0]])


def test_groups_have_one_size() -> None:
    assert order_of(torch.tensor([0, 0, 1, 1]), 2) is None
    order = order_of(torch.tensor([1, 0, 1, 0]), 2)
    assert order is not None and order.tolist() == [1, 3, 0, 2]
    for wrong in ([0, 0, 0, 1], [0, 0, 2, 2], [0, 0, -1, -1]):
        with pytest.raises(ModelLoadError, match="groups of one size"):
            order_of(torch.tensor(wrong), 2)


@pytest.mark.parametrize("shape", [(5,), (4, 3), (3, 2), (4, 2, 2)])
def test_scales_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelLoadError, match="does not fit 4 outputs and 8 inputs"):
        spread(torch.ones(shape), 4, 8)
