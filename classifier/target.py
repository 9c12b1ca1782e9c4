"""The target of a router: one number, which calibration turns into thresholds, and the kind of promise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from ..protocol.errors import ConfigurationError

TargetName = Literal["quality", "cloud_share", "cost"]
Promise = Literal["net", "no-loss", "mean"]
PROMISES: tuple[Promise, ...] = ("net", "no-loss", "mean")
#: Promises that count losses.
COUNTED: tuple[Promise, ...] = ("no-loss", "mean")
DEFAULT_QUALITY = 0.98
_SUFFIXES: dict[Promise, str] = {"mean": " on average", "no-loss": " no-loss"}


@dataclass(frozen=True, slots=True)
class Target:
    """A target and its promise. Raises ConfigurationError for invalid values, and for a cost without a price."""

    name: TargetName = "quality"
    # `quality`: minimum share of the cloud's score to keep, in (0, 1]. `cloud_share`: maximum share of requests to
    # escalate, in [0, 1]. `cost`: maximum cloud cost in US dollars per 1,000 requests, 0 or more.
    value: float = DEFAULT_QUALITY
    # The cloud's prices in US dollars per million prompt and answer tokens; None: unknown. A `cost` needs prices.
    prices: tuple[float, float] | None = None
    # `net`: each calibration meets the target with probability `promise_level`. `no-loss`: likewise, but what the
    # device does better than the cloud does not make up for losses, and a small loss counts as a whole one. `mean`:
    # calibrations meet the target on average, losses counted; about half of them miss it slightly. `net` and `no-loss`
    # differ for a quality only. The target `cost` always holds only on average.
    promise: Promise = "net"

    def __post_init__(self) -> None:
        raw: object = self.value
        kind, value = ("", self.value) if isinstance(raw, Real) else ("a number, ", math.nan)
        bounds, holds = {
            "quality": ("above 0 and at most 1", 0 < value <= 1),
            "cloud_share": ("from 0 to 1", 0 <= value <= 1),
            "cost": ("0 or more US dollars per 1,000 requests", 0 <= value < math.inf),
        }[self.name]
        if not holds:
            raise ConfigurationError(f"{self.name} must be {kind}{bounds}, not {raw!r}.", param=self.name)
        if self.promise not in PROMISES:
            raise ConfigurationError(f"promise must be {' or '.join(PROMISES)}, not {self.promise}.", param="promise")
        if self.name == "cost" and not any(self.prices or ()):
            why = "no price is set" if self.prices is None else "both prices are 0"
            raise ConfigurationError(
                f"cost needs the price of the cloud's tokens, and {why}: set prices.cloud_input and "
                "prices.cloud_output, or use the target quality or cloud_share.",
                param="prices",
            )

    @classmethod
    def of(
        cls,
        quality: float | None,
        cloud_share: float | None,
        cost: float | None,
        prices: tuple[float, float] | None = None,
    ) -> Target:
        """Create a target from the single value given; quality 0.98 if all are None."""
        stated: dict[TargetName, float | None] = {"quality": quality, "cloud_share": cloud_share, "cost": cost}
        return next(
            (cls(name, value, prices) for name, value in stated.items() if value is not None), cls(prices=prices)
        )

    def __str__(self) -> str:
        if self.name == "cost":
            return f"cost {self.value:g} US dollars per 1,000 requests"
        suffix = "" if self.name == "cloud_share" and self.promise == "no-loss" else _SUFFIXES.get(self.promise, "")
        return f"{self.name} {self.value:g}{suffix}"
