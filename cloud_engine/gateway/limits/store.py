"""The `LimitStore` interface: storage that several workers share for the usage of rate limits and budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ....accounting.accounts import AccountUsage, Claim
from ....accounting.budget import TokenDemand
from ....protocol.errors import OverloadedError

Settlement = tuple[Claim, float, str]
"""A claim with a reservation, the amount actually used, and the receipt of the admission."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The outcome of admitting one request's claims."""

    # State of each account before the admission, up to the first refusal.
    usages: Sequence[AccountUsage] = ()
    # The first claim that does not fit. None: all claims fit and are taken.
    refused: Claim | None = None
    # A budget without an account yet. Nothing is taken: call `seed` and retry.
    unknown: Claim | None = None
    # The store's clock, in seconds since the epoch.
    now: float = 0.0
    # Claims, with the granted tokens added, to settle at the end of the request.
    claims: Sequence[Claim] = ()
    # Token that makes settlement idempotent; empty for stores whose replies cannot get lost.
    receipt: str = ""
    # Completion tokens granted.
    tokens: int = 0


def unreachable(cause: str) -> OverloadedError:
    """Return the error of requests that need a limit while the store cannot be used."""
    message = f"{cause}, so the limits of this request cannot be checked: try again later."
    return OverloadedError(message, code="limits_unavailable")


class LimitStore(Protocol):
    """Accounts shared by worker processes or gateways. Methods raise OverloadedError if the store is unreachable."""

    # Whether the store was unreachable at the last attempt.
    failing: bool

    async def admit(self, claims: Sequence[Claim], wanted: TokenDemand | None = None) -> Admission:
        """Take all claims or none, and grant completion tokens between the minimum and the maximum of `wanted`.

        The amounts of `claims` already include the minimum number of tokens.
        """
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Replace reservations by the actual usage, later if the store is unreachable now."""
        ...

    async def seed(self, claim: Claim, spent: float) -> None:
        """Create a budget's account with the US dollars `spent` so far, unless the account exists."""
        ...

    async def close(self) -> None: ...
