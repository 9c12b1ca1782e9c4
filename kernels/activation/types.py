"""Names of the gated activations."""

from __future__ import annotations

from typing import Literal

#: Activation of the gate: silu in SwiGLU, gelu_tanh in GeGLU.
Activation = Literal["silu", "gelu_tanh"]
