"""What tokens cost: the two tiers' prices, and those of models that the user names."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...protocol.errors import ConfigurationError

_MOST_USD = 1e9  # for a million tokens: sums of more end in infinity, and no budget comes back from there


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars per million tokens."""

    # Of a prompt.
    input: float = 0.0
    # Of an answer.
    output: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("input", self.input), ("output", self.output)):
            if not 0 <= value <= _MOST_USD:  # NaN fails every comparison, so it lands here too
                raise ConfigurationError(
                    f"prices: {name} must be 0 or more, and at most {_MOST_USD:g}.", param="prices"
                )

    def of(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (prompt_tokens * self.input + completion_tokens * self.output) / 1e6


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars per million tokens. By default the device is free, the cloud at the price of a mid-size model."""

    # Of a prompt on this device.
    local_input: float = 0.0
    # Of an answer on this device.
    local_output: float = 0.0
    # Of a prompt in the cloud, for models that `models` does not name.
    cloud_input: float = 0.5
    # Of an answer in the cloud, for models that `models` does not name.
    cloud_output: float = 1.5
    # Prices of cloud models by name, each with `input` and `output`.
    models: dict[str, Price] = field(default_factory=dict[str, Price])

    def __post_init__(self) -> None:
        for name in ("local_input", "local_output", "cloud_input", "cloud_output"):
            if not 0 <= getattr(self, name) <= _MOST_USD:
                message = f"prices.{name} must be 0 or more, and at most {_MOST_USD:g}."
                raise ConfigurationError(message, param=f"prices.{name}")

    def local(self, prompt_tokens: int, completion_tokens: int) -> float:
        return Price(self.local_input, self.local_output).of(prompt_tokens, completion_tokens)

    def cloud(self, model: str, prompt_tokens: int, completion_tokens: int) -> float:
        return self.of_cloud(model).of(prompt_tokens, completion_tokens)

    def of_cloud(self, model: str) -> Price:
        return self.models.get(model) or Price(self.cloud_input, self.cloud_output)
