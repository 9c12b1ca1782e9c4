"""Configurations of models: sizes that the engine needs, and switches for the differences between families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .rope import RotaryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalConfig:
    """Sizes of a causal language model that the engine needs: its vocabulary, its context and its KV cache."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    # Attention window per layer in tokens, including the token itself; None: full attention. Empty: no windows.
    windows: tuple[int | None, ...] = ()

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens; None if the window covers the whole context."""
        window = self.windows[layer] if self.windows else None
        return None if window is None or window >= self.context_length else window

    @property
    def windowed(self) -> bool:
        """Return whether any layer's window is shorter than the context."""
        return any(self.window(layer) is not None for layer in range(self.num_layers))

    @property
    def reach(self) -> int | None:
        """Widest window of all layers in tokens, including the token itself; None if a layer has full attention."""
        windows = [self.window(layer) for layer in range(self.num_layers)]
        return None if None in windows else max(window for window in windows if window is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(CausalConfig):
    """Shape of a `Decoder`, and how its family differs from Llama. Defaults are Llama's."""

    intermediate_size: int
    rms_norm_eps: float
    rotary: RotaryConfig
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    # Whether norms multiply by 1 + weight, as in Gemma.
    unit_offset_norms: bool = False
    # Whether query and key norms extend over all heads, as in OLMo 2, not over each head.
    whole_qk_norm: bool = False
    # Whether layers have norms before attention and feed-forward, and after them.
    pre_norms: bool = True
    post_norms: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    # Rotation of some layers, if they have another than `rotary`, and whether each layer is one of them.
    second_rotary: RotaryConfig | None = None
    uses_second: tuple[bool, ...] = ()
    embedding_scale: float = 1.0
    # Factor of the attention scores; None for 1/sqrt(head_dim).
    attention_scale: float | None = None
    logit_soft_cap: float | None = None

    def rotation(self, layer: int) -> int:
        """Return which rotation a layer uses: 0 for `rotary`, 1 for `second_rotary`."""
        return int(self.uses_second[layer]) if self.uses_second else 0
