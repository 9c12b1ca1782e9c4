"""Writes models in quantised checkpoint formats, by the formats' written specifications.

Packing and dequantising are independent of the product's code: plain loops over bits, or the formats' own libraries.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each four bits of a word hold
FP8 = torch.float8_e4m3fn


@dataclass
class Stored:
    """A layer's tensors by the ends of their names, and the weight they stand for."""

    tensors: dict[str, Tensor]
    weight: Tensor


@dataclass
class Kind:
    """A format: `quantization_config`, and how a weight (outputs, inputs) is stored."""

    config: dict[str, Any]
    store: Callable[[Tensor], Stored]
    is_packed: bool = field(default=True)


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Rows of numbers in words of 32 bits, the first number in the lowest bits."""
    per_word = 32 // bits
    words = torch.zeros(len(numbers), -(-numbers.shape[1] // per_word), dtype=torch.int64)
    for index in range(numbers.shape[1]):
        words[:, index // per_word] |= numbers[:, index].long() << bits * (index % per_word)
    return words.to(torch.int32)


def grid(weight: Tensor, bits: int, groups: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers from 0 on (outputs, inputs), scales and zeros (outputs, groups); `groups` has the group of each input."""
    number = int(groups.max()) + 1
    largest = (1 << bits) - 1
    scales, zeros = (torch.empty(len(weight), number) for _ in range(2))
    for group in range(number):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scales[:, group] = ((high - low) / largest).half().float()
        zeros[:, group] = (1 << bits - 1) if symmetric else (-low / scales[:, group]).round().clamp(0, largest)
    numbers = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, largest)
    return numbers.int(), scales, zeros.int()


def in_order(inputs: int, size: int) -> Tensor:
    return torch.arange(inputs) // size


def shuffled(inputs: int, size: int) -> Tensor:
    """Groups as activation order leaves them: the same for all layers with the same inputs."""
    return in_order(inputs, size)[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]


def awq(size: int) -> Kind:
    def store(weight: Tensor) -> Stored:
        groups = in_order(weight.shape[1], size)
        numbers, scales, zeros = grid(weight, 4, groups, symmetric=False)

        def words(rows: Tensor) -> Tensor:
            order = [8 * word + place for word in range(rows.shape[1] // 8) for place in AWQ_ORDER]
            return packed(rows[:, order], 4)

        tensors = {"qweight": words(numbers.t()), "qzeros": words(zeros.t()), "scales": scales.t().half()}
        return Stored(tensors, (numbers - zeros[:, groups]) * scales[:, groups])

    return Kind({"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}, store)


def gptq(bits: int, size: int, *, version: int = 1, act_order: bool = False, symmetric: bool = False) -> Kind:
    def store(weight: Tensor) -> Stored:
        length = weight.shape[1]
        groups = (shuffled if act_order else in_order)(length, length if size == -1 else size)
        numbers, scales, zeros = grid(weight, bits, groups, symmetric=symmetric)
        stored_zeros = zeros if version == 2 else (zeros - 1) % (1 << bits)
        tensors = {
            "qweight": packed(numbers, bits).t(),
            "qzeros": packed(stored_zeros.t(), bits),
            "scales": scales.t().half(),
            "g_idx": groups.int(),
        }
        return Stored(tensors, (numbers - zeros[:, groups]) * scales[:, groups])

    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": act_order, "sym": symmetric}
    return Kind({**config, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}, store)


def block_fp8(block: int | None = 128) -> Kind:
    def store(weight: Tensor) -> Stored:
        outputs, inputs = weight.shape
        side = block or max(outputs, inputs)
        rows, columns = torch.arange(outputs) // side, torch.arange(inputs) // side
        scales = torch.empty(int(rows.max()) + 1, int(columns.max()) + 1)
        for row in range(len(scales)):
            for column in range(scales.shape[1]):
                scales[row, column] = weight[rows == row][:, columns == column].abs().max() / 448
        wide = scales[rows][:, columns]
        data = (weight / wide).to(FP8)
        stored_scale = scales if block else scales.reshape(())
        return Stored({"weight": data, "weight_scale_inv": stored_scale}, data.float() * wide)

    size = [block, block] if block else None
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": size}
    return Kind(config, store, is_packed=False)


def compressed(form: str, **weights: Any) -> Kind:
    """A format of the compressed-tensors library, which compresses and decompresses. `weights`: its arguments."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    is_static = weights.pop("static_activations", False)
    arguments = QuantizationArgs(**weights)
    activations = None if form == "pack-quantized" else QuantizationArgs(num_bits=8, type=arguments.type)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=activations, format=form)
    library = BaseCompressor.get_value_from_registry(form)

    def store(weight: Tensor) -> Stored:
        outputs, inputs = weight.shape
        match arguments.strategy:
            case "tensor":
                parts, shape = weight.reshape(1, -1), (1,)
            case "channel":
                parts, shape = weight, (outputs, 1)
            case "block":
                high, long = arguments.block_structure
                tiles = weight.view(outputs // high, high, inputs // long, long).transpose(1, 2)
                shape = tuple(tiles.shape[:2])
                parts = tiles.reshape(-1, high * long)
            case _:
                shape = (outputs, inputs // arguments.group_size)
                parts = weight.reshape(-1, arguments.group_size)
        scale, zero = (each.reshape(shape) for each in calculate_qparams(parts.amin(1), parts.amax(1), arguments))
        given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        stored = library.compress(given, scheme)
        plain = library.decompress(dict(stored), scheme)["weight"]
        if is_static:
            stored = {**stored, "input_scale": torch.tensor([0.01])}
        return Stored(stored, plain)

    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
    }
    return Kind(config, store, is_packed=form == "pack-quantized")


def compressed_in_activation_order(size: int) -> Kind:
    """Symmetric INT4 in groups of scattered inputs (`weight_g_idx`), which older versions of the library wrote."""
    kind = compressed("pack-quantized", num_bits=4, strategy="group", group_size=size)
    kind.config["config_groups"]["group_0"]["weights"]["actorder"] = "group"

    def store(weight: Tensor) -> Stored:
        groups = shuffled(weight.shape[1], size)
        numbers, scales, _ = grid(weight, 4, groups, symmetric=True)
        tensors = {
            "weight_packed": packed(numbers, 4),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
            "weight_g_idx": groups.int(),
        }
        return Stored(tensors, (numbers - 8) * scales[:, groups])

    return Kind(kind.config, store)


KINDS: dict[str, Callable[[], Kind]] = {
    "awq-32": lambda: awq(32),
    "awq-128": lambda: awq(128),
    "gptq-4-32": lambda: gptq(4, 32),
    "gptq-4-v2": lambda: gptq(4, 64, version=2),
    "gptq-4-order": lambda: gptq(4, 32, act_order=True),
    "gptq-4-symmetric": lambda: gptq(4, 128, symmetric=True),
    "gptq-4-channel": lambda: gptq(4, -1),
    "gptq-8": lambda: gptq(8, 32),
    "gptq-8-v2-order": lambda: gptq(8, 64, version=2, act_order=True),
    "fp8-block": block_fp8,
    "fp8-small-block": lambda: block_fp8(32),
    "fp8-tensor": lambda: block_fp8(None),
    "float-channel": lambda: compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "float-tensor-static": lambda: compressed(
        "float-quantized", num_bits=8, type="float", strategy="tensor", static_activations=True
    ),
    "float-block": lambda: compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[64, 64]
    ),
    "int-channel": lambda: compressed("int-quantized", num_bits=8, strategy="channel"),
    "int-tensor": lambda: compressed("int-quantized", num_bits=8, strategy="tensor"),
    "int-asymmetric": lambda: compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
    "pack-4-group": lambda: compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "pack-4-asymmetric": lambda: compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False
    ),
    "pack-4-channel": lambda: compressed("pack-quantized", num_bits=4, strategy="channel"),
    "pack-8-group": lambda: compressed("pack-quantized", num_bits=8, strategy="group", group_size=64),
    "pack-8-asymmetric": lambda: compressed("pack-quantized", num_bits=8, strategy="channel", symmetric=False),
    "pack-4-order": lambda: compressed_in_activation_order(32),
}


def write_quantized(model: Any, folder: Path, kind: Kind, *, plain: tuple[str, ...] = ("lm_head",)) -> None:
    """Write a transformers model as a quantised checkpoint, and give the model the dequantised weights.

    Layers whose names end with one of `plain` stay as they are.
    """
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and not name.endswith(plain):
            stored = kind.store(layer.weight.detach().clone())
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{leaf}": tensor.contiguous() for leaf, tensor in stored.tensors.items()}
            layer.weight.data = stored.weight.float()
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config=kind.config)


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
