"""Accounting: reserves limits and opens a ledger row before a request, and records usage and cost after it."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....accounting.ledger.reader import LedgerReader
from ....accounting.prices import Price, PriceTable, load_prices
from ....accounting.surcharges import surcharge_refused
from ....accounting.token_estimate import LONGEST_ANSWER
from ....protocol.errors import ConfigurationError, RequestCancelledError
from ....protocol.settings import state_folder
from ..access.principal import Principal
from ..ledger.ledger import LedgerFailureAction, UsageLedger
from ..ledger.metering import UsageRow
from ..ledger.opening import is_url, open_reader, open_store
from .limiter import Limiter, LimitReservation
from .limits_file import LimitsFile, read_limits_file
from .redis_store import RedisStore
from .request_size import RequestSize
from .shared_memory import SharedMemoryStore

_log = logging.getLogger("updraft.gateway")


@dataclass(frozen=True, slots=True)
class AccountingOptions:
    """The settings of the ledger, prices and limits."""

    # The usage database: a SQLite file, or a PostgreSQL URL.
    database: str = field(repr=False)
    # Whether to stop or continue serving while the ledger cannot be written.
    on_failure: LedgerFailureAction = "stop"
    # Age in days at which rows are deleted. None: rows are kept forever.
    keep_days: float | None = None
    # Price file: a path or an https URL. None: no prices.
    prices: str | None = None
    # TOML file with the limits of tenants and models.
    limits: Path | None = None
    # URL of a Redis server, for limits shared by gateways. None: limits are shared by the workers of this machine only.
    limits_url: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Accounting:
    """The ledger, the limits and the prices of one worker process."""

    ledger: UsageLedger
    reader: LedgerReader
    limiter: Limiter
    prices: PriceTable
    # Prices by node URL, for nodes that have their own.
    node_prices: Mapping[str, Price] = field(default_factory=dict[str, Price])

    @asynccontextmanager
    async def in_flight(self, principal: Principal) -> AsyncGenerator[LimitReservation]:
        """Count a request as in flight, from the start of its upload. Raises RateLimitError or OverloadedError."""
        reservation = await self.limiter.enter(principal)
        try:
            yield reservation
        finally:
            await reservation.settle(0, 0, None)

    @asynccontextmanager
    async def admitted(
        self, principal: Principal, row: UsageRow, size: RequestSize, in_flight: LimitReservation | None = None
    ) -> AsyncGenerator[Account]:
        """Reserve limits for the duration of a request, then settle them and the reservation `entered`.

        The caller settles `row` in the ledger. Raises RateLimitError, PermissionDeniedError, UnsupportedFeatureError or
        OverloadedError.
        """
        if size.surcharge and self.limiter.has_budget(principal, row.model):
            raise surcharge_refused(size.surcharge)
        reservation = await self.limiter.admit(principal, row.model, size.prompt_tokens, size.answer, in_flight)
        account, is_left = Account(self, row, size, reservation), False
        if reservation.is_capped:
            account.cap = size.answer.cap(reservation.tokens)
        row.cost_usd = reservation.usd  # the cost that the row keeps if this process dies now
        try:
            await self.ledger.open(row)
            yield account
        except RequestCancelledError:
            is_left = True
            raise
        finally:
            account.book(is_left=is_left)
            await reservation.settle(row.prompt_tokens, row.completion_tokens, row.cost_usd)

    def usage(self) -> list[dict[str, Any]]:
        """Return the usage, summed by key and model. Waits a short time for pending rows."""
        self.ledger.flush()
        return self.reader.totals(["key", "model"])

    def log_useless_limits(self, served: Collection[str]) -> None:
        """Log which limits cannot apply to any request, or allow none. `served`: the names of all models."""
        rules, priced = self.limiter.limits_file, self.prices.priced_at(time.time())
        if unknown := sorted(rules.models.keys() - served):
            _log.warning("--limits: no node serves the model %s, so its limits never apply.", ", ".join(unknown))
        budgets = sorted(name for name, limits in rules.tenants.items() if limits.has_budget)
        if budgets and not priced.intersection(served) and served:
            models = ", ".join(sorted(served))
            _log.warning("--limits: every request of %s is refused: no price for %s.", ", ".join(budgets), models)

    async def close(self) -> None:
        await self.limiter.store.close()


@dataclass(slots=True)
class Account:
    """The running cost of one request, booked to its ledger row."""

    _accounting: Accounting
    _row: UsageRow
    # Upper bounds on the tokens of prompt and answer, used if no node reports the count.
    _size: RequestSize
    reservation: LimitReservation
    # Cap on each answer's tokens, if budgets require a cap.
    cap: int | None = None
    # Whether the request was sent to a node.
    is_sent: bool = False
    # Usage that `book` saved last, so that unchanged usage is not saved again.
    _booked: tuple[int, ...] = ()

    def book_longest(self, most: int = LONGEST_ANSWER) -> None:
        """Record the longest possible answer, capped at `most` tokens, unless the node has reported token counts."""
        if self.is_sent and not (self._row.prompt_tokens or self._row.completion_tokens):
            self._row.completion_tokens = min(most, self.reservation.tokens or self._size.answer.assumed)

    def book(self, *, is_left: bool = False) -> None:
        """Save the cost so far in the ledger. Called before the client gets the end of an answer, so that a crash never
        makes a complete answer free. `is_left`: the client disconnected before the end.
        """
        row, accounting = self._row, self._accounting
        if self.is_sent and not row.prompt_tokens and (row.completion_tokens or row.status == 200 or is_left):
            row.prompt_tokens = self._size.prompt_tokens  # the node may have processed the whole prompt
        tokens = row.prompt_tokens, row.completion_tokens, row.cached_tokens, row.stored_tokens, row.stored_1h_tokens
        if (row.status, *tokens) == self._booked:
            return
        self._booked = row.status, *tokens
        price = accounting.node_prices.get(row.node) or accounting.prices.at(row.model, row.started_at)
        if price is not None:
            row.cost_usd = price.of(*tokens)
        accounting.ledger.book(row)


def check_accounting(options: AccountingOptions) -> None:
    """Check the settings before forking workers. Raises the errors of `open_accounting`."""
    _rules(options)
    store = open_store(options.database)
    store.check()
    store.close()
    if options.limits_url:
        RedisStore(options.limits_url)  # validates the URL, connects later


def open_accounting(options: AccountingOptions, node_prices: Mapping[str, Price] | None = None) -> Accounting:
    """Open the ledger, prices and limits. Raises ConfigurationError, or MissingDependencyError (client library)."""
    prices, rules = _rules(options)
    reader = open_reader(options.database)
    ledger = UsageLedger(open_store(options.database), on_failure=options.on_failure, keep_days=options.keep_days)
    ledger.flush()  # settle the rows of dead workers first, because budgets start from the sums in the ledger
    file = state_folder() / "gateway" if is_url(options.database) else Path(options.database).resolve()
    store = RedisStore(options.limits_url) if options.limits_url else SharedMemoryStore(Path(f"{file}.limits"))
    return Accounting(ledger, reader, Limiter(store, rules, prices, reader), prices, node_prices or {})


def _rules(options: AccountingOptions) -> tuple[PriceTable, LimitsFile]:
    prices = PriceTable({}) if options.prices is None else load_prices(options.prices)
    rules = LimitsFile() if options.limits is None else read_limits_file(options.limits)
    priced = prices.priced_at(time.time())
    budgets = [f"models.{name}" for name in rules.models.keys() - priced if rules.models[name].has_budget]
    if not priced:
        budgets += [f"tenants.{name}" for name, limits in rules.tenants.items() if limits.has_budget]
    if budgets:
        message = f"The budget of {budgets[0]} in {options.limits} needs a price: add it to the table of --prices."
        raise ConfigurationError(message, param="limits")
    return prices, rules
