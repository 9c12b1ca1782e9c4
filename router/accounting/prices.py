"""Prices of a router's two tiers and of the cloud models in its settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...accounting.prices import MAX_USD, Price
from ...accounting.reported_usage import ReportedUsage
from ...protocol.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in US dollars per million tokens. By default, the device is free and a cloud's cost is unknown."""

    # Price of prompt tokens on the device.
    local_input: float = 0.0
    # Price of completion tokens on the device.
    local_output: float = 0.0
    # Price of prompt tokens in the cloud, for models missing in `models`. Requires `cloud_output`.
    cloud_input: float | None = None
    # Price of completion tokens in the cloud, for models missing in `models`. Requires `cloud_input`.
    cloud_output: float | None = None
    # Prices of cloud models by name: `input`, `output`, and the optional fields below.
    models: dict[str, Price] = field(default_factory=dict[str, Price])

    def __post_init__(self) -> None:
        for name in ("local_input", "local_output", "cloud_input", "cloud_output"):
            value: float | None = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_USD:
                message = f"prices.{name} must be 0 or more, and at most {MAX_USD:g}."
                raise ConfigurationError(message, param=f"prices.{name}")
        if (self.cloud_input is None) != (self.cloud_output is None):
            missing = "prices.cloud_input" if self.cloud_input is None else "prices.cloud_output"
            raise ConfigurationError(f"{missing} is missing: set it too, to 0 if the cloud is free.", param=missing)

    def local(self, prompt_tokens: int, completion_tokens: int) -> float:
        return Price(self.local_input, self.local_output).of(prompt_tokens, completion_tokens)

    def cloud(self, model: str, usage: ReportedUsage) -> float | None:
        """Return the cost in US dollars, or None if the model has no price."""
        price = self.of_cloud(model)
        return None if price is None else price.of(*usage.priced)

    def of_cloud(self, model: str) -> Price | None:
        if model in self.models or self.cloud_input is None or self.cloud_output is None:
            return self.models.get(model)
        return Price(self.cloud_input, self.cloud_output)
