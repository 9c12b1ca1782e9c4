"""Prices of tokens: those of the two tiers, and of models that the user names."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...protocol.errors import ConfigurationError

_MAX_USD = 1e9  # for a million tokens: sums of more end in infinity, and no budget comes back from there


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars per million tokens."""

    # Of a prompt.
    input: float = 0.0
    # Of an answer.
    output: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("input", self.input), ("output", self.output)):
            if not 0 <= value <= _MAX_USD:  # NaN fails every comparison, so it lands here too
                raise ConfigurationError(f"prices: {name} must be 0 or more, and at most {_MAX_USD:g}.", param="prices")

    def of(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (prompt_tokens * self.input + completion_tokens * self.output) / 1e6


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars per million tokens. The device is free by default; what an unpriced cloud costs is unknown."""

    # Of a prompt on this device.
    local_input: float = 0.0
    # Of an answer on this device.
    local_output: float = 0.0
    # Of a prompt in the cloud, for models that `models` does not name. `cloud_output` goes with it.
    cloud_input: float | None = None
    # Of an answer in the cloud, for models that `models` does not name. `cloud_input` goes with it.
    cloud_output: float | None = None
    # Prices of cloud models by name, each with `input` and `output`.
    models: dict[str, Price] = field(default_factory=dict[str, Price])

    def __post_init__(self) -> None:
        for name in ("local_input", "local_output", "cloud_input", "cloud_output"):
            value: float | None = getattr(self, name)
            if value is not None and not 0 <= value <= _MAX_USD:
                message = f"prices.{name} must be 0 or more, and at most {_MAX_USD:g}."
                raise ConfigurationError(message, param=f"prices.{name}")
        if (self.cloud_input is None) != (self.cloud_output is None):
            missing = "prices.cloud_input" if self.cloud_input is None else "prices.cloud_output"
            raise ConfigurationError(f"{missing} is missing: set it too, to 0 if it is free.", param=missing)

    def local(self, prompt_tokens: int, completion_tokens: int) -> float:
        return Price(self.local_input, self.local_output).of(prompt_tokens, completion_tokens)

    def cloud(self, model: str, prompt_tokens: int, completion_tokens: int) -> float | None:
        """None where the model has no price."""
        price = self.of_cloud(model)
        return None if price is None else price.of(prompt_tokens, completion_tokens)

    def of_cloud(self, model: str) -> Price | None:
        if model in self.models or self.cloud_input is None or self.cloud_output is None:
            return self.models.get(model)
        return Price(self.cloud_input, self.cloud_output)
