"""Quantised checkpoints that cannot be served are refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_reference import reference_model
from quantized_checkpoints import KINDS, edit_config, edit_tensors, write_quantized
from thread_group import ThreadGroup
from torch import Tensor
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.protocol.errors import ConfigurationError, ModelLoadError

LAYER = "model.layers.1.mlp.down_proj"


def written(folder: Path, kind: str, **options: Any) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2, "num_hidden_layers": 2}
    write_quantized(reference_model("Llama", **(sizes | options)), folder, KINDS[kind]())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported; supported: awq, compressed-tensors, fp8"),
        ({"bits": 4}, "method 'None' is not supported"),
        ({"quant_method": "awq", "bits": 3}, "bits=3 is not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv' is not supported"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point=False is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "bits=3 is not supported; supported: 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin' is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two positive integers"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'"),
        (
            {"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": {"format": "sparse-bitmask"}},
            "sparsity_config is not supported",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 3}}}},
            "group_0: num_bits=3 is not supported",
        ),
    ],
)
def test_unsupported_settings(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    reference_model().save_pretrained(tmp_path)
    edit_config(tmp_path, quantization_config=config)
    with pytest.raises(ModelLoadError, match=named):
        load_model(tmp_path)


def without(leaf: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(f"{LAYER}.{leaf}")


def replaced(leaf: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.{leaf}"] = make(tensors[f"{LAYER}.{leaf}"]).contiguous()

    return edit


@pytest.mark.parametrize(
    ("kind", "edit", "named"),
    [
        ("awq-32", without("scales"), "missing tensors: .*down_proj.scales"),
        ("gptq-8", without("qzeros"), "missing tensors: .*down_proj.qzeros"),
        ("fp8-block", without("weight_scale_inv"), "missing tensors: .*down_proj.weight_scale_inv"),
        ("int-channel", without("weight_scale"), "missing tensors: .*down_proj.weight_scale"),
        ("pack-4-group", without("weight_packed"), "missing tensors: .*down_proj.weight"),
        ("awq-32", replaced("qweight", lambda t: t[:-1]), "down_proj: qweight .* do not fit 256 inputs"),
        ("gptq-8", replaced("qzeros", lambda t: t[:, 1:]), "down_proj: qzeros .* do not fit"),
        ("gptq-4-32", replaced("g_idx", lambda t: t * 0), "groups of one size"),
        ("fp8-block", replaced("weight", lambda t: t[:, :64]), "down_proj: .*scale of shape|shape .128, 64"),
        ("fp8-block", replaced("weight_scale_inv", lambda t: t[:, :1]), "scale of shape"),
        ("int-channel", replaced("weight", lambda t: t[1:]), "scale of shape"),
        ("pack-4-group", replaced("weight_packed", lambda t: t[:, 1:]), "does not hold 4 or 8 bits of 256 inputs"),
        ("pack-4-asymmetric", replaced("weight_zero_point", lambda t: t[1:]), "weight_zero_point .* does not fit"),
        ("pack-4-group", replaced("weight_packed", lambda t: t.flatten()), "must have two dimensions"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, kind: str, edit: Callable[..., object], named: str) -> None:
    written(tmp_path, kind)
    edit_tensors(tmp_path, edit)
    with pytest.raises(ModelLoadError, match=named):
        load_model(tmp_path)


def test_weights_of_which_only_some_parts_are_quantised(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    write_quantized(reference_model("Llama", **sizes), tmp_path, KINDS["awq-32"](), plain=("lm_head", "k_proj"))
    with pytest.raises(ModelLoadError, match=r"k_proj.weight.* only some are quantized"):
        load_model(tmp_path)


def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    written(tmp_path, "gptq-8")
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"{LAYER}.bias": torch.zeros(128)}))
    load_model(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"{LAYER}.bias": torch.ones(128)}))
    with pytest.raises(ModelLoadError, match=r"unexpected tensors: .*down_proj\.bias"):
        load_model(tmp_path)


def test_groups_are_not_split_across_ranks(tmp_path: Path) -> None:
    written(tmp_path, "awq-128", intermediate_size=384)
    with pytest.raises(ConfigurationError, match=r"3 groups of 128 inputs in a layer.*Use 1 or 3"):
        load_model(tmp_path, group=ThreadGroup.of(2)[0])


def test_inputs_in_another_order_are_not_split_across_ranks(tmp_path: Path) -> None:
    written(tmp_path, "gptq-4-order")
    with pytest.raises(ConfigurationError, match=r"2 ranks would split quantization groups.*Use 1\."):
        load_model(tmp_path, group=ThreadGroup.of(2)[0])


def test_sizes_that_no_kernel_supports(tmp_path: Path) -> None:
    written(tmp_path, "gptq-4-32", intermediate_size=288)
    with pytest.raises(ConfigurationError, match=r"down_proj: .*multiple of 64"):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", ["awq-32", "fp8-block"])
def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path, kind: str) -> None:
    written(tmp_path, kind)
    with pytest.raises(ConfigurationError, match=r"is quantized already .*Omit the option"):
        load_model(tmp_path, quantization="int8")


def test_inputs_that_cannot_be_quantised_at_load(tmp_path: Path) -> None:
    reference_model("Llama").save_pretrained(tmp_path)  # 96 neurons
    with pytest.raises(ConfigurationError, match="multiple of 64"):
        load_model(tmp_path, quantization="int4")


def test_fp8_at_load_needs_a_gpu_that_multiplies_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_model().save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ConfigurationError, match=r"fp8 needs a GPU of compute capability 8\.9"):
        load_model(tmp_path, quantization="fp8", device="cuda")
