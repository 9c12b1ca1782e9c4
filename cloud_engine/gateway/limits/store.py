"""Stores of the accounts of limits: what each must offer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ....accounting.accounts import Claim, Standing
from ....accounting.budget import Wanted

Settlement = tuple[Claim, float, str]
"""A claim that reserved something, the amount that was used instead, and the receipt of the admission."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The outcome of one request's claims."""

    # How each account stood before, as far as they were looked at.
    standings: Sequence[Standing] = ()
    # The first claim that does not fit. None: all fit, and are taken.
    refused: Claim | None = None
    # A budget that the store does not know yet: nothing is taken, `seed` it and ask again.
    unknown: Claim | None = None
    # The store's time, in seconds since the epoch.
    now: float = 0.0
    # The claims to settle in the end.
    claims: Sequence[Claim] = ()
    # Settles the claims once; stores whose answers cannot get lost need none.
    receipt: str = ""
    # Tokens of the answer that are reserved.
    tokens: int = 0


class LimitStore(Protocol):
    """Accounts that worker processes, or gateways, share. Raises OverloadedError where it cannot be reached in time."""

    async def admit(self, claims: Sequence[Claim], wanted: Wanted | None = None) -> Admission:
        """Take all of the claims or none, and grant tokens of the answer between the least and the most of `wanted`.

        The claims' amounts include the least.
        """
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Put what was really used in the place of what claims reserved. Later, where it cannot be reached now."""
        ...

    async def seed(self, claim: Claim, spent: float) -> None:
        """Begin a budget with what the ledger says, unless somebody has."""
        ...

    async def close(self) -> None: ...
