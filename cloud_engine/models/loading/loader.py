"""Loading of a model from a folder or a GGUF file. Missing and unexpected tensors are errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ....kernels.linear.ops import QuantizedEmbedding, QuantizedLinear
from ....kernels.linear.types import QuantizedWeight
from ....kernels.runtime.backend import Quantization
from ....kernels.runtime.host_memory import release_freed_memory
from ....protocol.errors import ModelLoadError
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
    with torch.device("meta"):
        whole, model = Decoder(config), Decoder(config, group)
    parameters = dict(whole.named_parameters())  # lists a tied head only once
    own = {model.whole_name(name): name for name, _ in model.named_parameters()}
    sources = _sources(checkpoint, family, list(parameters))
    layers = QuantizedLayers(checkpoint, sources)
    _check_names(checkpoint, sources, layers, tied_head=config.tie_word_embeddings, ignored=family.ignored)
    dtype = dtype or checkpoint.dtype(sources["embed_tokens.weight"][0])
    total = sum(parameters[name].numel() for name in own) * dtype.itemsize
    state: dict[str, Tensor] = {}
    quantized: dict[str, QuantizedWeight] = {}
    loaded = 0
    for name in filter(own.__contains__, sources):
        parts, shape, module = sources[name], parameters[name].shape, own[name].rpartition(".")[0]
        shard = getattr(model.get_submodule(module), "shard", None)
        if name in layers:
            quantized[module] = layers.load(name, tuple(shape), shard)
        else:
            rows = _rows(checkpoint, parts, shape)
            weight = torch.empty(shape, dtype=dtype, device=device if group.size == 1 else "cpu")
            for part, piece in zip(parts, weight.split(rows), strict=True):
                checkpoint.copy_into(part, piece)
            weight = weight if shard is None else shard.take(weight)
            if quantize is not None and name.endswith(".weight") and isinstance(model.get_submodule(module), Linear):
                quantized[module] = quantize(weight)
            else:
                state[own[name]] = weight.to(device)
        loaded += shape.numel() * dtype.itemsize
        if progress:
            progress(loaded, total)
    is_tied = config.tie_word_embeddings and group.is_last
    for module, weight in quantized.items():
        layer = QuantizedLinear(weight, state.pop(f"{module}.bias", None), dtype).to(device)
        model.set_submodule(module, QuantizedEmbedding(layer) if module == "embed_tokens" else layer)
        if module == "embed_tokens" and is_tied:
            model.set_submodule("lm_head", layer)
    model.load_state_dict(state, assign=True, strict=False)  # not strict, because `_check_names` has checked the names
    if is_tied and "embed_tokens" not in quantized:
        model.lm_head.weight = model.embed_tokens.weight
    release_freed_memory()  # intermediate results of decoding
    return model.eval().requires_grad_(False)


def family_of(fields: Fields) -> Family:
    """Return the family of a model configuration. Raises ModelLoadError for an unknown architecture."""
    wanted = architecture(fields)
    for family in FAMILIES:
        if wanted in family.architectures:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ModelLoadError(f"{fields.where}: architecture {wanted!r} is not supported; supported: {known}.")


def _sources(checkpoint: Checkpoint, family: Family, parameters: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the tensors of each parameter, under the first prefix of the family in the checkpoint."""
    choices = [family.sources(parameters, prefix) for prefix in family.prefixes]
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
    """Return the number of rows of each part. Raises ModelLoadError for wrong shapes, before memory is allocated."""
    shapes = [checkpoint.shape(part) for part in parts]
    rows = [shape[0] for shape in shapes]
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
