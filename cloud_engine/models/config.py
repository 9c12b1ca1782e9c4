"""The numbers and switches that one decoder needs to be any of the supported families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .rope import RotaryConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only transformer, and in what its family differs from Llama. All defaults are Llama's."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rotary: RotaryConfig
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    # The weights of norms are stored less one.
    unit_offset_norms: bool = False
    # Norms also behind attention and feed-forward.
    sandwich_norms: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    # Per layer, how many tokens back attention reaches (the token itself included), None for all of them; empty
    # for a model without sliding windows.
    windows: tuple[int | None, ...] = ()
    # The rotation of layers with a window where it is another one.
    sliding_rotary: RotaryConfig | None = None
    embedding_scale: float = 1.0
    # Factor of the scores, None for 1/sqrt(head_dim).
    attention_scale: float | None = None
    logit_soft_cap: float | None = None

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer; None where it would not shorten the context."""
        window = self.windows[layer] if self.windows else None
        return None if window is None or window >= self.context_length else window

    @property
    def windowed(self) -> bool:
        """Whether any layer looks back over a window."""
        return any(self.window(layer) is not None for layer in range(self.num_layers))

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer has a sliding window, and with it `sliding_rotary`, even if no context is as long."""
        return bool(self.windows) and self.windows[layer] is not None

    @property
    def reach(self) -> int | None:
        """The tokens that any layer looks back, the token itself included; None if one looks back to the start."""
        windows = [self.window(layer) for layer in range(self.num_layers)]
        return None if None in windows else max(window for window in windows if window is not None)
