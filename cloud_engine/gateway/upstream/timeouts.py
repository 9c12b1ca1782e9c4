"""The gateway's time-outs."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ....protocol.errors import ConfigurationError
from .connection import Patience


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds. Raises ConfigurationError for one that is no positive number."""

    # For a connection to a node, its TLS handshake included.
    connect_s: float = 2.0
    # For the first bytes of a stream.
    first_token_s: float = 120.0
    # Between two pieces of a stream.
    idle_s: float = 30.0
    # For a request from its arrival to its last byte, the time in which the client sends its body included.
    whole_s: float = 600.0
    # For the first bytes of an answer, before a second node gets the request too. None: none ever does.
    hedge_after_s: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigurationError(f"{each.name} must be a number above 0, got {value}.", param=each.name)

    @property
    def of_streams(self) -> Patience:
        return Patience(self.first_token_s, self.idle_s)
