"""Compiles a loaded decoder whose weights are packed for C kernels, so that all its layers run in one C call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...kernels.attention.cpu import NativeAttention
from ...kernels.attention.ragged_batch import Passes
from ...kernels.decoder.continuation import NativeContinuation
from ...kernels.decoder.cpu import NativeDecoder
from ...kernels.decoder.types import DecoderWeights, LayerWeights
from ...kernels.linear.cpu import NativeEmbedding, NativeLinear
from ...kernels.sampling.types import Sampling
from .config import ModelConfig
from .decoder import Decoder, DecoderLayer
from .layers import GatedMLP, GroupedQueryAttention, RMSNorm


class CompiledDecoder:
    """A decoder whose layers run in one C call, with native attention. The weights are not copied.

    No module or weight of the model may be replaced or moved afterwards.
    """

    def __init__(self, model: Decoder, layers: NativeDecoder) -> None:
        self._model = model
        self._layers = layers
        self._continuation = _continuation(model, layers)

    def __call__(self, token_ids: Tensor, positions: Tensor, attention: NativeAttention) -> Tensor:
        """Return the last hidden states, bit-identical to `Decoder.forward`."""
        return self._layers.run(self._model.embed(token_ids), self._model.rotations(positions), attention)

    @property
    def can_continue(self) -> bool:
        """Return whether `continued` is available for this model."""
        return self._continuation is not None

    def continued(
        self, first: Sequence[int], passes: Passes, attention: NativeAttention, sampling: Sampling
    ) -> list[list[int]]:
        """Run several passes in one C call (see `NativeContinuation.run`)."""
        assert self._continuation is not None, "check can_continue first"
        rotations = self._model.rotations(torch.from_numpy(passes.positions()))
        return self._continuation.run(first, passes, rotations, attention, sampling)


def compile_decoder(model: Decoder) -> CompiledDecoder | None:
    """Compile a model whose linear layers are packed for C. Return None if a layer is not, or C lacks support.

    A model of several ranks is not compiled, because its layers exchange data; neither is one with experts or sinks.
    """
    config = model.config
    if not model.group.is_alone or config.whole_qk_norm or config.has_sinks:
        return None
    layers = [_layer(layer, config, index) for index, layer in enumerate(model.layers)]  # type: ignore[arg-type]
    packed = [layer for layer in layers if layer is not None]
    if len(packed) < len(layers):
        return None
    weights = DecoderWeights(
        packed, model.norm.weight, config.rms_norm_eps, config.unit_offset_norms, config.activation
    )
    return CompiledDecoder(model, NativeDecoder(weights)) if weights.is_supported else None


def _continuation(model: Decoder, layers: NativeDecoder) -> NativeContinuation | None:
    """Return the C implementation of `continued`; None if the output layer is not packed for C or caps its logits."""
    head, embeddings = model.lm_head, model.embed_tokens
    if not isinstance(head, NativeLinear) or model.config.logit_soft_cap is not None:
        return None
    table = embeddings.head if isinstance(embeddings, NativeEmbedding) else embeddings.weight
    return NativeContinuation(layers, head, table, model.embedding_scale)


def _layer(layer: DecoderLayer, config: ModelConfig, index: int) -> LayerWeights | None:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, GroupedQueryAttention) or not isinstance(mlp, GatedMLP):
        return None
    qkv, output, gate_up, down = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
    if not (
        isinstance(qkv, NativeLinear)
        and isinstance(output, NativeLinear)
        and isinstance(gate_up, NativeLinear)
        and isinstance(down, NativeLinear)
        and isinstance(layer.input_norm, RMSNorm)
        and isinstance(layer.mlp_norm, RMSNorm)
    ):
        return None
    return LayerWeights(
        *(qkv, output, gate_up, down),
        input_norm=layer.input_norm.weight,
        mlp_norm=layer.mlp_norm.weight,
        query_norm=_weight(attention.q_norm),
        key_norm=_weight(attention.k_norm),
        attention_out_norm=_weight(layer.attention_out_norm),
        mlp_out_norm=_weight(layer.mlp_out_norm),
        window=attention.layer.window,
        rotation=config.rotation(index),
        scale=attention.layer.scale,
    )


def _weight(norm: nn.Module | None) -> Tensor | None:
    return norm.weight if isinstance(norm, RMSNorm) else None
