"""Rotary positions (Su et al. 2021): inverse frequencies of all supported scaling variants, and the angles.

A scaling variant only changes frequencies known when a model is loaded, so `RotaryConfig` holds these numbers and the
running model does not depend on the variant. Parameter names are those of Hugging Face's `rope_parameters`.
"""

# torch leaves `Tensor.tolist` untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.kv_cache.types import Rotation
from ...protocol.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """The rotation parameters of a model."""

    # Radians per position, for each pair of rotated dimensions.
    inverse_frequencies: tuple[float, ...]
    # Factor of cosines and sines (YaRN's attention temperature).
    magnitude: float = 1.0

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any], *, rotary_dim: int, context_length: int) -> RotaryConfig:
        """Compute frequencies for `rotary_dim` dimensions at positions up to `context_length`.

        Some variants (`dynamic`, `longrope`) treat short and long sequences differently. Here, all sequences count as
        `context_length` long, so that cached keys stay valid while a sequence grows. Raises ModelLoadError for an
        unknown `rope_type` and for missing or invalid parameters.
        """
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if not isinstance(kind, str) or kind not in _VARIANTS:
            raise ModelLoadError(f"rope_type={kind!r} is not supported; supported: {', '.join(_VARIANTS)}.")
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        try:
            theta = float(parameters.get("rope_theta", 10000.0))
            scaled = _VARIANTS[kind](_Base(theta, exponents, context_length, parameters))
        except KeyError as error:
            raise ModelLoadError(f"rope_type={kind!r} needs the parameter {error.args[0]!r}.") from error
        except (TypeError, ValueError) as error:
            raise ModelLoadError(f"rope_type={kind!r} has a parameter of the wrong type: {error}.") from error
        except ArithmeticError as error:
            raise ModelLoadError(f"rope_type={kind!r} cannot be computed: {error}.") from error
        frequencies, magnitude = scaled
        if not (frequencies.isfinite() & (frequencies > 0)).all() or not math.isfinite(magnitude):
            raise ModelLoadError(f"rope_type={kind!r} gives frequencies that are not finite and above 0.")
        if frequencies.shape != exponents.shape:
            raise ModelLoadError(f"rope_type={kind!r} needs {len(exponents)} factors, got {len(frequencies)}.")
        return cls(tuple(frequencies.tolist()), magnitude)


class Rotary:
    """Computes the rotation angles of a forward pass. The frequencies are cached on the device of the positions."""

    def __init__(self, config: RotaryConfig) -> None:
        self._config = config
        self._frequencies: Tensor | None = None

    def __call__(self, positions: Tensor) -> Rotation:
        """Return cosines and sines of the rotation angles, float32, for `positions` (tokens,) int64."""
        if self._frequencies is None or self._frequencies.device != positions.device:
            numbers = self._config.inverse_frequencies
            self._frequencies = torch.tensor(numbers, dtype=torch.float32, device=positions.device)
        angles = positions.float()[:, None] * self._frequencies
        return Rotation(angles.cos() * self._config.magnitude, angles.sin() * self._config.magnitude)


@dataclass(frozen=True, slots=True)
class _Base:
    """Inputs of a scaling variant. `exponents`: 2i / rotary_dim for dimension pair i, float32."""

    theta: float
    exponents: Tensor
    context_length: int
    parameters: Mapping[str, Any]

    @property
    def plain(self) -> Tensor:
        return 1.0 / self.theta**self.exponents

    def number(self, name: str, default: float | None = None) -> float:
        """Return a parameter, or `default` if it is missing or null. Raises KeyError if there is no default."""
        value = self.parameters.get(name)
        if value is None and default is None:
            raise KeyError(name)
        return float(default if value is None else value)  # type: ignore[arg-type]

    @property
    def stretch(self) -> float:
        """Ratio of the context length to the trained context length: `factor`, else computed from these lengths."""
        original = self.number("original_max_position_embeddings")
        return self.number("factor", self.context_length / original)


_Scaled = tuple[Tensor, float]


def _default(base: _Base) -> _Scaled:
    return base.plain, 1.0


def _linear(base: _Base) -> _Scaled:
    """Linear scaling (Chen et al. 2023): divide positions by `factor`."""
    return base.plain / base.number("factor"), 1.0


def _llama3(base: _Base) -> _Scaled:
    """Llama 3.1: stretch long wavelengths by `factor`, keep short ones, and interpolate in between."""
    factor, low, high = base.number("factor"), base.number("low_freq_factor"), base.number("high_freq_factor")
    original = base.number("original_max_position_embeddings")
    plain = base.plain
    wavelengths = 2 * math.pi / plain
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / factor + smooth * plain, 1.0


def _yarn(base: _Base) -> _Scaled:
    """YaRN (Peng et al. 2023): interpolate dimensions that rotate slowly, keep fast ones, and blend in between."""
    original = base.number("original_max_position_embeddings")
    dims = 2 * len(base.exponents)

    def dimension_of(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base.theta))

    low = dimension_of(base.number("beta_fast", 32))
    high = dimension_of(base.number("beta_slow", 1))
    if base.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = (torch.arange(dims // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    interpolated = ramp.clamp(0, 1)
    frequencies = base.plain / base.stretch * interpolated + base.plain * (1 - interpolated)
    return frequencies, base.number("attention_factor", _yarn_magnitude(base))


def _yarn_magnitude(base: _Base) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(base.stretch) + 1.0 if base.stretch > 1 else 1.0

    both = base.number("mscale", 0), base.number("mscale_all_dim", 0)
    return magnitude(both[0]) / magnitude(both[1]) if all(both) else magnitude(1.0)


def _longrope(base: _Base) -> _Scaled:
    """LongRoPE (Ding et al. 2024): tuned factors per dimension, with a second list for contexts beyond training."""
    original = base.number("original_max_position_embeddings")
    name = "long_factor" if base.context_length > original else "short_factor"
    factors = torch.tensor([float(factor) for factor in base.parameters[name]])
    if factors.shape != base.exponents.shape:
        return factors, 1.0  # wrong length, for which the caller raises the error
    stretch = base.stretch
    magnitude = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return 1.0 / (factors * base.theta**base.exponents), base.number("attention_factor", magnitude)


_VARIANTS: Mapping[str, Callable[[_Base], _Scaled]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,  # NTK-aware scaling affects only sequences longer than in training, which the engine refuses
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
