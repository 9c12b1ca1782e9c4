"""Names of the gated activations."""

from __future__ import annotations

from typing import Literal

#: Activation of the gate: silu in SwiGLU, gelu_tanh in GeGLU, swigluoai in the clamped SwiGLU of gpt-oss.
Activation = Literal["silu", "gelu_tanh", "swigluoai"]
#: Of swigluoai: the factor in the sigmoid, and the largest gate and magnitude of the up part.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
