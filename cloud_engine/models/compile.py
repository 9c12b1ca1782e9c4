"""Where a packed decoder's weights are, for the C that runs all its layers in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from ...kernels.decoder.continuation import NativeContinuation
from ...kernels.decoder.cpu import NativeDecoder
from ...kernels.decoder.types import DecoderWeights, LayerWeights
from ...kernels.linear.cpu import NativeEmbedding, NativeLinear
from .config import ModelConfig
from .layers import RMSNorm

if TYPE_CHECKING:
    from .decoder import Decoder, DecoderLayer


def native_decoder(model: Decoder) -> NativeDecoder | None:
    """The layers of `model` in one call of C; None where not all of its linear layers are packed for that."""
    config = model.config
    layers = [_layer(layer, config, index) for index, layer in enumerate(model.layers)]  # type: ignore[arg-type]
    packed = [layer for layer in layers if layer is not None]
    if len(packed) < len(layers):
        return None
    weights = DecoderWeights(
        packed, model.norm.weight, config.rms_norm_eps, config.unit_offset_norms, config.activation
    )
    return NativeDecoder(weights) if weights.is_supported else None


def native_continuation(model: Decoder, layers: NativeDecoder) -> NativeContinuation | None:
    """Whole passes of `model`, from token to token, around its `layers`; None where the head is not packed for that, or
    caps its logits."""
    head, embeddings = model.lm_head, model.embed_tokens
    if not isinstance(head, NativeLinear) or model.config.logit_soft_cap is not None:
        return None
    is_tied = isinstance(embeddings, NativeEmbedding)
    return NativeContinuation(layers, head, None if is_tied else embeddings.weight, model.embedding_scale)


def _layer(layer: DecoderLayer, config: ModelConfig, index: int) -> LayerWeights | None:
    attention, mlp = layer.attention, layer.mlp
    qkv, output, gate_up, down = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
    if not (
        isinstance(qkv, NativeLinear)
        and isinstance(output, NativeLinear)
        and isinstance(gate_up, NativeLinear)
        and isinstance(down, NativeLinear)
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
        rotation=int(config.is_sliding(index)),
        scale=attention.layer.scale,
    )


def _weight(norm: nn.Module | None) -> Tensor | None:
    return norm.weight if isinstance(norm, RMSNorm) else None
