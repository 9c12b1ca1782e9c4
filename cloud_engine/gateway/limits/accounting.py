"""Accounting of a request: its limits before, an intent in the ledger, and its usage after."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....accounting.budget import GrowingAnswer
from ....accounting.ledger.reading import LedgerReader
from ....accounting.prices import Price, PriceTable, load_prices
from ....protocol.errors import RequestCancelledError
from ....protocol.settings import state_folder
from ..access.principal import Principal
from ..ledger.ledger import FailurePolicy, UsageLedger
from ..ledger.metering import UsageRow
from ..ledger.opening import is_url, open_reader, open_store
from .limiter import Limiter, LimitReservation
from .policy import LimitPolicy, load_policy
from .prompt_tokens import PromptTokens
from .redis_store import RedisStore
from .request_size import RequestSize
from .shared_memory import SharedMemoryStore


@dataclass(frozen=True, slots=True)
class AccountingOptions:
    """The place of accounts, and their rules."""

    # A SQLite file, or a PostgreSQL URL.
    database: str = field(repr=False)
    # What becomes of requests while the ledger cannot be written.
    on_failure: FailurePolicy = "stop"
    # Older rows are deleted. None: none is.
    keep_days: float | None = None
    # A path or https URL.
    prices: str | None = None
    # The TOML file with the limits of tenants and models.
    limits: Path | None = None
    # A Redis server, for limits that gateways share. None: the workers of this machine share them.
    limits_url: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Accounting:
    """The ledger, the limits and the prices of one worker process."""

    ledger: UsageLedger
    reader: LedgerReader
    limiter: Limiter
    prices: PriceTable
    # Of nodes with prices of their own, by URL.
    node_prices: Mapping[str, Price] = field(default_factory=dict[str, Price])
    # What prompts really had.
    prompts: PromptTokens = field(default_factory=PromptTokens)

    @asynccontextmanager
    async def entered(self, principal: Principal) -> AsyncGenerator[LimitReservation]:
        """Around a request, its body included: it counts as in flight. Raises RateLimitError or OverloadedError."""
        reservation = await self.limiter.enter(principal)
        try:
            yield reservation
        finally:
            await reservation.settle(0, 0, None)

    @asynccontextmanager
    async def admitted(
        self, principal: Principal, row: UsageRow, size: RequestSize, entered: LimitReservation | None = None
    ) -> AsyncGenerator[Account]:
        """Around a request to nodes, whose reservation is settled with that of `entered`. The caller settles the row.

        Raises RateLimitError, PermissionDeniedError or OverloadedError.
        """
        prompt_tokens = self.prompts.estimate(row.key_id, row.model, size.prompt_tokens)
        reservation = await self.limiter.admit(principal, row.model, prompt_tokens, size.answer, entered)
        account, is_left = Account(self, row, prompt_tokens, reservation), False
        if reservation.tokens:
            account.cap = size.answer.cap(reservation.tokens) if reservation.is_capped else None
            account.growing = GrowingAnswer(reservation.tokens)
        try:
            await self.ledger.open(row)
            yield account
        except RequestCancelledError:
            is_left = True
            raise
        finally:
            account.book(is_left=is_left)
            self.prompts.learn(row.key_id, row.model, size.prompt_tokens, account.counted_tokens)
            await reservation.settle(row.prompt_tokens, row.completion_tokens, row.cost_usd)

    def usage(self) -> list[dict[str, Any]]:
        """Sums by key and model. Waits for rows on their way and for the database, but not for long."""
        self.ledger.flush()
        return self.reader.totals(["key", "model"])

    async def close(self) -> None:
        await self.limiter.store.close()


@dataclass(slots=True)
class Account:
    """The account of one request."""

    _accounting: Accounting
    _row: UsageRow
    # Tokens of the prompt, if no node counts them.
    _estimate: int
    # Of its limits.
    reservation: LimitReservation
    # The limit of each answer, where budgets force one.
    cap: int | None = None
    # The tokens of a stream so far, where budgets count them.
    growing: GrowingAnswer | None = None
    # Whether a node was sent the request.
    is_sent: bool = False
    _is_estimated: bool = False
    # What was booked last.
    _booked: tuple[int, ...] = ()

    @property
    def counted_tokens(self) -> int:
        """Of the prompt, by the node; 0 where it did not say."""
        return 0 if self._is_estimated and self._row.prompt_tokens == self._estimate else self._row.prompt_tokens

    async def tops_up(self, growing: GrowingAnswer) -> bool:
        """Reserve more for a stream that passes its reservation; False where budgets end."""
        is_topped_up = await self.reservation.top_up()
        growing.reserved = self.reservation.tokens
        return is_topped_up

    def book(self, *, is_left: bool = False) -> None:
        """Put what it cost so far where the death of this process leaves it: before the client has the end of an
        answer, so that none costs nothing. `is_left`: the client did not wait for it.
        """
        row, accounting = self._row, self._accounting
        if self.is_sent and not row.prompt_tokens and (row.completion_tokens or row.status == 200 or is_left):
            row.prompt_tokens, self._is_estimated = self._estimate, True  # the node has read it, or may have
        costs = row.status, row.prompt_tokens, row.completion_tokens, row.cached_tokens
        if costs == self._booked:
            return
        self._booked = costs
        price = accounting.node_prices.get(row.node) or accounting.prices.at(row.model, row.started_at)
        if price is not None:
            row.cost_usd = price.of(row.prompt_tokens, row.completion_tokens, row.cached_tokens)
        accounting.ledger.book(row)


def check_accounting(options: AccountingOptions) -> None:
    """Raises what `open_accounting` would raise in every worker."""
    _rules(options)
    store = open_store(options.database)
    store.check()
    store.close()
    if options.limits_url:
        RedisStore(options.limits_url)  # connects with its first request


def open_accounting(options: AccountingOptions, node_prices: Mapping[str, Price] | None = None) -> Accounting:
    """Raises ConfigurationError, or MissingDependencyError where a client library is missing."""
    prices, policy = _rules(options)
    reader = open_reader(options.database)
    ledger = UsageLedger(open_store(options.database), on_failure=options.on_failure, keep_days=options.keep_days)
    ledger.flush()  # budgets begin with what dead workers have left behind too
    file = state_folder() / "gateway" if is_url(options.database) else Path(options.database)
    store = RedisStore(options.limits_url) if options.limits_url else SharedMemoryStore(Path(f"{file}.limits"))
    return Accounting(ledger, reader, Limiter(store, policy, prices, reader), prices, node_prices or {})


def _rules(options: AccountingOptions) -> tuple[PriceTable, LimitPolicy]:
    prices = PriceTable({}) if options.prices is None else load_prices(options.prices)
    return prices, LimitPolicy() if options.limits is None else load_policy(options.limits)
