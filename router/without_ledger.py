"""A router whose ledger cannot be opened: requests go on, and only what a budget limits is refused."""

from __future__ import annotations

from typing import NoReturn

from ..protocol.errors import BudgetExceededError
from .accounting.budget import Budget, Demand, Reservation
from .request.caller import Caller

#: Seconds between two tries to open the ledger. Requests start them.
RETRY_S = 30.0


class UnknownBudget(Budget):
    """A budget whose ledger cannot be opened: nobody knows what is left, so nothing is spent."""

    def __init__(self, problem: str) -> None:
        super().__init__({}, None)  # pyright: ignore[reportArgumentType] - nothing here reads a ledger
        self._problem = problem

    async def exceeded(self, caller: Caller, demand: Demand) -> BudgetExceededError:
        del caller, demand
        return self._error()

    async def reserve(self, caller: Caller, demand: Demand, held: Reservation | None = None) -> NoReturn:
        del caller, demand, held
        raise self._error()

    def _error(self) -> BudgetExceededError:
        return BudgetExceededError(f"budget unknown, so nothing is spent: {self._problem}", code="ledger_unavailable")
