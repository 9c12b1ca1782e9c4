"""Names of the gated activations."""

from __future__ import annotations

from typing import Literal

#: SwiGLU and GeGLU.
Activation = Literal["silu", "gelu_tanh"]
