"""Timeouts of the gateway's requests."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ....protocol.errors import ConfigurationError
from .connection import SilenceTimeouts


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The gateway's timeouts, in seconds. Raises ConfigurationError for a value that is not a positive number."""

    # Timeout for connecting to a node, including the TLS handshake.
    connect_timeout_s: float = 2.0
    # Timeout for the first bytes of a stream.
    first_token_timeout_s: float = 120.0
    # Timeout between two pieces of a stream.
    idle_timeout_s: float = 30.0
    # Timeout for a whole request, from arrival to the last byte, including the upload of the body.
    timeout_s: float = 600.0
    # Silence of a node after which the request is also sent to a second node. None: no hedging.
    hedge_after_s: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigurationError(f"{each.name} must be a number above 0, got {value}.", param=each.name)

    @property
    def of_streams(self) -> SilenceTimeouts:
        return SilenceTimeouts(self.first_token_timeout_s, self.idle_timeout_s)
