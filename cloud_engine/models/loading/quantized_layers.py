"""Linear layers that a checkpoint stores in a quantized format."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ....kernels.linear.types import QuantizedWeight
from ....protocol.errors import ConfigurationError, ModelLoadError
from ..formats import formats_of
from ..formats.format import Format, StoredWeight, alike, assembled, joined
from ..formats.gguf import GGUF_BLOCKS
from ..sharding import ExpertShard, Shard
from .checkpoint import SafetensorsFolder
from .gguf_file import GgufFile

_INT4_INPUTS = 64  # INT4 kernels need a multiple of this number
_KV_SCALES = (".k_scale", ".v_scale")  # of a quantized KV cache, which the engine does not have
_LOG = logging.getLogger(__name__)


class QuantizedLayers:
    """The model's weights whose parts a checkpoint stores in a quantized format.

    The stored tensors decide which layers are quantized, not the lists in the configuration. Raises ModelLoadError if
    only some parts of a weight are quantized; such a weight of a GGUF file is read as a plain one.
    """

    def __init__(self, checkpoint: SafetensorsFolder | GgufFile, sources: Mapping[str, tuple[str, ...]]) -> None:
        self._checkpoint, self._is_gguf = checkpoint, isinstance(checkpoint, GgufFile)
        formats = () if isinstance(checkpoint, GgufFile) else formats_of(checkpoint.fields)
        self._ignored = (*(f".{leaf}" for form in formats for leaf in form.ignored), *_KV_SCALES) if formats else ()
        self._layers: dict[str, list[tuple[str, Format]]] = {}
        for name, parts in sources.items():
            candidates = [(part.removesuffix(".weight"), _format(checkpoint, part, formats)) for part in parts]
            layers = [(layer, form) for layer, form in candidates if form is not None]
            if layers and len(layers) < len(candidates):
                if self._is_gguf:
                    continue
                raise ModelLoadError(
                    f"{checkpoint.where}: of {', '.join(parts)}, only some are quantized; all or none must be."
                )
            if layers:
                self._layers[name] = layers
        if isinstance(checkpoint, GgufFile):
            plain = [part for name, parts in sources.items() if name not in self._layers for part in parts]
            types = [kind for kind in map(checkpoint.block_type, plain) if kind is not None]
            if types:
                which = ", ".join(sorted(set(types)))
                _LOG.warning(
                    "%s: dequantizing %d tensors (%s), which takes memory.", checkpoint.where, len(types), which
                )

    def __contains__(self, name: str) -> bool:
        return name in self._layers

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor need not be read: scales of activations, or GPTQ's biases of zeros."""
        if name.endswith(".bias") and self._layers:
            return not self._checkpoint.read(name).any()
        return name.endswith(self._ignored)

    def renamed(self, expected: set[str]) -> set[str]:
        """Return the `expected` tensors, with the tensors of quantized layers instead of their plain weights."""
        stored = {layer: form for layers in self._layers.values() for layer, form in layers}
        plain = expected - stored.keys() - {f"{layer}.weight" for layer in stored}
        return plain | {_named(layer, leaf) for layer, form in stored.items() for leaf in self._leaves(layer, form)}

    def load(
        self, name: str, shape: tuple[int, ...], shard: Shard | ExpertShard | None, *, interleaved: bool = False
    ) -> list[QuantizedWeight]:
        """Load a rank's part of a weight of `shape` in the whole model: one matrix, or one for each of its experts.

        `interleaved`: the outputs alternate between gate and up projection. Raises ModelLoadError or
        ConfigurationError.
        """
        layers = self._layers[name]
        try:
            if not isinstance(shard, ExpertShard):
                return [self._matrix(layers, shape, shard)]
            layer, form = layers[0]
            if form.required[0].startswith("_"):  # tensors of all experts
                tensors = self._tensors(layer, form)
                if any(tensor.shape[:1] != shape[:1] for tensor in tensors.values()):
                    raise ModelLoadError(f"{', '.join(form.required)} must have {shape[0]} experts")
                inputs = shape[2]
                decoded = [
                    form.decode({leaf: tensor[expert] for leaf, tensor in tensors.items()}, inputs)
                    for expert in shard.experts
                ]
                decoded = [each.deinterleaved() if interleaved else each for each in decoded]
                return [_packed(each, shape[1:], shard.matrix) for each in decoded]
            parts = len(layers) // shape[0]  # of each expert
            own = [layers[expert * parts : (expert + 1) * parts] for expert in shard.experts]
            return [self._matrix(each, shape[1:], shard.matrix) for each in own]
        except ModelLoadError as error:
            names = " + ".join(layer for layer, _ in layers)
            raise ModelLoadError(f"{self._checkpoint.where}: {names}: {error.message}.") from error
        except ConfigurationError as error:
            fault = f"{name.removesuffix('.weight')}: {error.message}"
            raise ConfigurationError(fault, param=error.param) from error

    def _matrix(
        self, layers: Sequence[tuple[str, Format]], shape: tuple[int, ...], shard: Shard | None
    ) -> QuantizedWeight:
        parts = [self._part(layer, form, shape[1]) for layer, form in layers]
        whole = joined(alike(parts) if self._is_gguf else parts)
        return _packed(whole, shape, shard, narrow=self._is_gguf)

    def _part(self, layer: str, form: Format, inputs: int) -> StoredWeight:
        checkpoint, name = self._checkpoint, _named(layer, "weight")
        if isinstance(checkpoint, GgufFile):
            pieces = (form.decode({"weight": piece}, inputs) for piece in checkpoint.pieces(name))
            return assembled(pieces, checkpoint.shape(name)[0])
        tensors = self._tensors(layer, form)
        matrices = [leaf for leaf in form.required if not leaf.startswith("weight_scale")]
        if any(tensors[leaf].dim() != 2 for leaf in matrices):
            raise ModelLoadError(f"{', '.join(matrices)} must have two dimensions")
        return form.decode(tensors, inputs)

    def _tensors(self, layer: str, form: Format) -> dict[str, Tensor]:
        return {leaf: self._checkpoint.read(_named(layer, leaf)) for leaf in self._leaves(layer, form)}

    def _leaves(self, layer: str, form: Format) -> list[str]:
        return [*form.required, *(leaf for leaf in form.optional if self._checkpoint.has(_named(layer, leaf)))]


def _format(checkpoint: SafetensorsFolder | GgufFile, part: str, formats: tuple[Format, ...]) -> Format | None:
    """Return the format of a part of a weight; None if it is plain."""
    if isinstance(checkpoint, GgufFile):
        return GGUF_BLOCKS.get(checkpoint.kind(part))
    layer = part.removesuffix(".weight")
    marked = [form for form in formats if checkpoint.has(_named(layer, form.required[0]))]
    marked = [form for form in marked if form.required[0] != "weight" or checkpoint.is_quantized(part)]
    complete = [form for form in marked if all(checkpoint.has(_named(layer, each)) for each in form.required)]
    return next(iter((*complete, *marked)), None)


def _named(layer: str, leaf: str) -> str:
    """Return the name of a layer's tensor."""
    return layer + leaf if leaf.startswith("_") else f"{layer}.{leaf}"


def _packed(
    whole: StoredWeight, shape: tuple[int, ...], shard: Shard | None, *, narrow: bool = False
) -> QuantizedWeight:
    """Return a rank's part in the kernels' form. `narrow`: 4 bits become 8 if no kernel multiplies so few inputs."""
    if tuple(whole.numbers.shape) != shape:
        raise ModelLoadError(f"shape {tuple(whole.numbers.shape)}; the configuration needs {shape}")
    own = whole if shard is None else whole.take(shard)
    return (replace(own, bits=8) if narrow and own.numbers.shape[1] % _INT4_INPUTS else own).pack()
