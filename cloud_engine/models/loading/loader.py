"""Loading of a model from a folder or a GGUF file. Missing and unexpected tensors are errors."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ....kernels.experts.ops import ExpertLinear, SeparateExperts
from ....kernels.linear.ops import QuantizedEmbedding, QuantizedLinear
from ....kernels.linear.types import Fp8Weight, QuantizedWeight
from ....kernels.runtime.backend import Quantization
from ....kernels.runtime.host_memory import release_freed_memory
from ....protocol.errors import ConfigurationError, ModelLoadError
from ..causal_model import CausalModel
from ..decoder import Decoder
from ..families import FAMILIES
from ..families.family import Family, architecture
from ..fields import Fields, read_json
from ..formats.load_time import quantizer
from ..layers import Linear
from ..sharding import ALONE, ModelGroup
from ..transformers_model import check_options, load_transformers_model
from .checkpoint import SafetensorsFolder
from .gguf_file import GgufFile
from .quantized_layers import QuantizedLayers

_LOG = logging.getLogger(__name__)

#: Called after each parameter with the number of bytes loaded so far, and the total.
Progress = Callable[[int, int], None]
Checkpoint = SafetensorsFolder | GgufFile


def load_any_model(
    path: Path,
    *,
    dtype: torch.dtype | None,
    device: str,
    progress: Progress | None = None,
    group: ModelGroup = ALONE,
    quantization: Quantization | None = None,
) -> CausalModel:
    """Load a model as `load_model` does, or through transformers if its architecture has no family here."""
    if path.suffix != ".gguf":
        fields = Fields(read_json(path / "config.json"), str(path / "config.json"))
        if not any(architecture(fields) in family.architectures for family in FAMILIES):
            is_quantized = quantization is not None or "quantization_config" in fields.values
            ranks = group.size * group.num_stages
            check_options(architecture(fields), ranks=ranks, is_quantized=is_quantized)
            return load_transformers_model(path, architecture(fields), dtype, device)
    return load_model(path, dtype=dtype, device=device, progress=progress, group=group, quantization=quantization)


def load_model(
    path: Path,
    *,
    dtype: torch.dtype | None = torch.float32,
    device: str = "cpu",
    progress: Progress | None = None,
    group: ModelGroup = ALONE,
    quantization: Quantization | None = None,
) -> Decoder:
    """Load a Hugging Face style folder or a GGUF file, converting plain weights to `dtype` one by one.

    If `dtype` is None, all plain weights get the type of the stored embedding. A rank of a larger `group` keeps only
    its part of each weight. Layers and embeddings that are stored in a quantized format keep it. `quantization`
    quantizes all linear layers of a plain model, except a tied head.

    Raises ModelLoadError for an unknown architecture, a missing or damaged file, and missing, unexpected or wrongly
    shaped tensors; the message names them. Raises ConfigurationError if the weights do not suit `group` or
    `quantization`.
    """
    checkpoint = GgufFile(path) if path.suffix == ".gguf" else SafetensorsFolder(path)
    family = family_of(checkpoint.fields)
    config = family.read_config(checkpoint.fields)
    quantize = None if quantization is None else quantizer(quantization, checkpoint.fields, device)
    if quantize is not None and config.experts is not None and device != "cpu":
        fault = f"quantization: the experts of {config.architecture} can be quantized on CPUs only. Omit the option."
        raise ConfigurationError(fault, param="quantization")
    with torch.device("meta"):
        whole, model = Decoder(config), Decoder(config, group)
    parameters = dict(whole.named_parameters())  # lists a tied head only once
    own = {model.whole_name(name): name for name, _ in model.named_parameters()}
    sources = _sources(checkpoint, family, list(parameters), config.experts.count if config.experts else 0)
    layers = QuantizedLayers(checkpoint, sources)
    _check_names(checkpoint, sources, layers, tied_head=config.tie_word_embeddings, ignored=family.ignored)
    dtype = dtype or checkpoint.dtype(sources["embed_tokens.weight"][0])
    total = sum(parameters[name].numel() for name in own) * dtype.itemsize
    state: dict[str, Tensor] = {}
    quantized: dict[str, list[QuantizedWeight]] = {}
    loaded = 0
    for name in filter(own.__contains__, sources):
        parts, shape, module = sources[name], parameters[name].shape, own[name].rpartition(".")[0]
        layer = model.get_submodule(module)
        shard = getattr(layer, "shard", None)
        if name in layers:
            weights = layers.load(name, tuple(shape), shard, interleaved=family.is_interleaved(name))
            if isinstance(layer, ExpertLinear) and device != "cpu":
                state[own[name]] = torch.stack([_plain(each, dtype) for each in weights]).to(device)
                _LOG.info("%s: dequantized, because no kernel multiplies quantized experts on GPUs", module)
            else:
                quantized[module] = weights
        else:
            exact = torch.float32 if name.endswith("e_score_correction_bias") else dtype  # decides between experts
            place = device if group.size == 1 else "cpu"
            weight = _read(checkpoint, parts, parameters[name].to(exact), partial(family.stored, name), place)
            weight = weight if shard is None else shard.take(weight)
            if quantize is not None and name.endswith(".weight") and _is_quantizable(layer, module):
                quantized[module] = [quantize(each) for each in (weight if weight.dim() == 3 else [weight])]
            else:
                state[own[name]] = weight.to(device)
        loaded += shape.numel() * dtype.itemsize
        if progress:
            progress(loaded, total)
    _set_quantized(model, quantized, state, dtype, device)
    model.load_state_dict(state, assign=True, strict=False)  # not strict, because `_check_names` has checked the names
    if config.tie_word_embeddings and group.is_last and "embed_tokens" not in quantized:
        model.lm_head.weight = model.embed_tokens.weight
    release_freed_memory()  # intermediate results of decoding
    return model.eval().requires_grad_(False)


def _set_quantized(
    model: Decoder,
    quantized: Mapping[str, Sequence[QuantizedWeight]],
    state: dict[str, Tensor],
    dtype: torch.dtype,
    device: str,
) -> None:
    """Replace modules by quantized ones, whose biases are taken out of `state`. Experts have a weight each."""
    for module, weights in quantized.items():
        is_expert = isinstance(model.get_submodule(module), ExpertLinear)
        bias = state.pop(f"{module}.bias", None)
        biases = bias if bias is not None and is_expert else [bias] * len(weights)
        layers = [QuantizedLinear(*each, dtype).to(device) for each in zip(weights, biases, strict=True)]
        if module == "embed_tokens":
            model.set_submodule(module, QuantizedEmbedding(layers[0]))
            if model.config.tie_word_embeddings and model.group.is_last:
                model.set_submodule("lm_head", layers[0])
        else:
            model.set_submodule(module, SeparateExperts(layers) if is_expert else layers[0])


def _read(
    checkpoint: Checkpoint, parts: tuple[str, ...], meta: Tensor, stored: Callable[[Tensor], Tensor], device: str
) -> Tensor:
    """Read a whole parameter like `meta`. `stored` returns the view of it that the `parts` of the checkpoint fill."""
    rows = _rows(checkpoint, parts, tuple(stored(meta).shape))
    weight = torch.empty(meta.shape, dtype=meta.dtype, device=device)
    for part, piece in zip(parts, stored(weight).split(rows), strict=True):
        checkpoint.copy_into(part, piece)
    return weight


def _plain(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Return a quantized weight as (features, inputs) in `dtype`, its inputs in order."""
    plain, order = weight.dequantized().to(dtype), None if isinstance(weight, Fp8Weight) else weight.order
    return plain if order is None else plain[:, order.argsort()]


def family_of(fields: Fields) -> Family:
    """Return the family of a model configuration. Raises ModelLoadError for an unknown architecture."""
    wanted = architecture(fields)
    for family in FAMILIES:
        if wanted in family.architectures:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ModelLoadError(f"{fields.where}: architecture {wanted!r} is not supported; supported: {known}.")


def _is_quantizable(layer: nn.Module, name: str) -> bool:
    """Return whether a layer is a large matrix: routers and the gates of shared experts stay exact."""
    return isinstance(layer, Linear | ExpertLinear) and not name.endswith(("router", "shared_gate"))


def _sources(checkpoint: Checkpoint, family: Family, parameters: list[str], experts: int) -> dict[str, tuple[str, ...]]:
    """Return the tensors of each parameter, under the first prefix of the family in the checkpoint."""
    choices = [family.sources(parameters, prefix, experts) for prefix in family.prefixes]
    fit = (each for each in choices if not checkpoint.difference(set(each["embed_tokens.weight"]))[0])
    return next(fit, choices[0])


def _check_names(
    checkpoint: Checkpoint,
    sources: Mapping[str, tuple[str, ...]],
    layers: QuantizedLayers,
    *,
    tied_head: bool,
    ignored: tuple[str, ...],
) -> None:
    expected = layers.renamed({part for parts in sources.values() for part in parts})
    missing, unexpected = checkpoint.difference(expected)
    _refuse(checkpoint.where, "missing", missing)
    # Some exporters also write derived tensors: rotary frequencies, or the output layer of a tied head.
    derived = ("rotary_emb.inv_freq", "lm_head.weight") if tied_head else ("rotary_emb.inv_freq",)
    unexpected = {name for name in unexpected if not name.endswith(derived) and not name.startswith(ignored)}
    unexpected = {name for name in unexpected if not layers.is_ignored(name)}
    _refuse(checkpoint.where, "unexpected", unexpected)


def _rows(checkpoint: Checkpoint, parts: tuple[str, ...], wanted: tuple[int, ...]) -> list[int]:
    """Return the number of rows of each part. Raises ModelLoadError for wrong shapes, before memory is allocated.

    Several of the last `wanted` dimensions may be stored as one.
    """
    shapes = [checkpoint.shape(part) for part in parts]
    rows = [shape[0] if shape else 0 for shape in shapes]
    if shapes and 1 < len(shapes[0]) < len(wanted):
        wanted = (*wanted[: len(shapes[0]) - 1], math.prod(wanted[len(shapes[0]) - 1 :]))
    if any(shape[1:] != wanted[1:] for shape in shapes) or sum(rows) != wanted[0]:
        stored = " + ".join(f"{part} {shape}" for part, shape in zip(parts, shapes, strict=True))
        raise ModelLoadError(
            f"{checkpoint.where}: {stored} has the wrong shape; the configuration needs {tuple(wanted)}."
        )
    return rows


def _refuse(where: str, what: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise ModelLoadError(f"{where}: {what} tensors: {shown}.")
