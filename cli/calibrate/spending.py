"""Budget of a calibration. Reserves the likely cost of each request in advance, to stay within the limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...accounting.budget import plain_number
from ...accounting.prices import Price
from ...accounting.token_estimate import answer_size, prompt_tokens
from ...protocol.errors import BudgetExceededError, ConfigurationError
from ...router.accounting.prices import Prices


class Spending:
    """Spending of one calibration in US dollars, earlier runs included. `limit` None: no limit."""

    def __init__(
        self,
        prices: Prices,
        limit: float | None,
        models: Sequence[str],
        *,
        spent: float = 0.0,
        on_spent: Callable[[float], None] = lambda _usd: None,
    ) -> None:
        """`on_spent` receives each cost. Raises ConfigurationError if there is a limit and a model has no price."""
        self._prices: dict[str, Price | None] = {model: prices.of_cloud(model) for model in models}
        unpriced = [model for model, price in self._prices.items() if price is None]
        if limit is not None and unpriced:
            raise ConfigurationError(
                f"--budget needs the price of {unpriced[0]}: set input and output, in US dollars per million "
                f'tokens, in [prices.models."{unpriced[0]}"].',
                param="prices",
            )
        self.known = not unpriced
        self.spent = spent
        self.tokens = 0, 0  # tokens read and written in this run
        self._limit = limit
        self._reserved = 0.0
        self._on_spent = on_spent

    def reserve(self, model: str, body: dict[str, Any]) -> float:
        """Reserve and return the highest likely cost of a request. Raises BudgetExceededError."""
        return self.hold(self.likely(model, body))

    def likely(self, model: str, body: dict[str, Any]) -> float:
        price = self._prices[model]
        read = prompt_tokens(msgspec.json.encode(body), bytes_per_token=1)
        return 0.0 if price is None else price.of(read, answer_size(body, "chat/completions").least)

    def hold(self, usd: float) -> float:
        """Reserve `usd`. Raises BudgetExceededError if the sum would exceed the limit."""
        if self._limit is not None and self.spent + self._reserved + usd > self._limit + 1e-12:
            limit, spent, reserved, cost = map(plain_number, (self._limit, self.spent, self._reserved, usd))
            raise BudgetExceededError(
                f"the budget of ${limit} does not cover the next request: ${spent} spent, ${reserved} reserved, and "
                f"the request may cost ${cost}"
            )
        self._reserved += usd
        return usd

    def settle(self, reserved: float, usd: float) -> None:
        """Replace a reservation with the actual cost."""
        self._reserved -= reserved
        self.spent += usd
        if usd:
            self._on_spent(usd)

    def cost(self, model: str, read: int, written: int) -> float:
        """Add an answer's tokens to `tokens`. Return the answer's cost; 0 if the model has no price."""
        price = self._prices[model]
        self.tokens = self.tokens[0] + read, self.tokens[1] + written
        return 0.0 if price is None else price.of(read, written)
