"""Token prices by model and start date, from settings, a price file, or LiteLLM's public price list."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ..protocol.decoding import prepare_types
from ..protocol.errors import ConfigurationError
from ..protocol.validation_messages import plain_words

_MAX_BYTES = 64_000_000
_FETCH_S = 30.0
MAX_USD = 1e9  # maximum per million tokens, so that the sums in a budget cannot overflow to infinity
Dollars = Annotated[float, msgspec.Meta(ge=0, le=MAX_USD)]
#: Anthropic's prices of cache writes, for 5 minutes and for an hour, as multiples of the price of prompt tokens.
_CACHE_WRITE, _CACHE_WRITE_1H = 1.25, 2.0
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**40)]


@dataclass(frozen=True, slots=True)
class Price:
    """Prices in US dollars per million tokens."""

    # US dollars per million prompt tokens.
    input: Dollars = 0.0
    # US dollars per million completion tokens.
    output: Dollars = 0.0
    # Price of cached prompt tokens. None: same as `input`.
    cached_input: Dollars | None = None
    # Maximum tokens of the model's answers, reserved if a request sets no limit. None: unknown.
    max_output: _Tokens | None = None
    # Price of prompt tokens written to the cloud's cache. None: 1.25 times `input`, as at Anthropic.
    cache_write_input: Dollars | None = None
    # Price of prompt tokens written to the cache for an hour. None: twice `input`, as at Anthropic.
    cache_write_1h_input: Dollars | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached_input", "cache_write_input", "cache_write_1h_input"):
            value: float | None = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_USD:  # also true for NaN
                raise ConfigurationError(f"prices: {name} must be 0 or more, and at most {MAX_USD:g}.", param="prices")
        if self.max_output is not None and self.max_output < 1:
            raise ConfigurationError("prices: max_output must be at least 1.", param="prices")

    def of(
        self,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int = 0,
        stored_tokens: int = 0,
        stored_1h_tokens: int = 0,
    ) -> float:
        """Return the cost of one request in US dollars. `stored_tokens`: prompt tokens written to the cache, of which
        `stored_1h_tokens` for an hour."""
        cached = self.input if self.cached_input is None else self.cached_input
        write, write_1h = self._cache_writes
        cost = max(0, prompt_tokens - cached_tokens - stored_tokens) * self.input
        cost += min(cached_tokens, prompt_tokens) * cached + completion_tokens * self.output
        cost += max(0, stored_tokens - stored_1h_tokens) * write + stored_1h_tokens * write_1h
        return cost / 1e6

    @property
    def highest_input(self) -> float:
        """Highest of the set prices of prompt tokens, for estimates before a request."""
        optional = self.cached_input, self.cache_write_input, self.cache_write_1h_input
        return max(self.input, *(price or 0.0 for price in optional))

    @property
    def highest_stored_input(self) -> float:
        """The same for a request that asks the cloud to cache its prompt."""
        return max(self.highest_input, *self._cache_writes)

    @property
    def _cache_writes(self) -> tuple[float, float]:
        write, write_1h = self.cache_write_input, self.cache_write_1h_input
        return (
            self.input * _CACHE_WRITE if write is None else write,
            self.input * _CACHE_WRITE_1H if write_1h is None else write_1h,
        )


class DatedPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"since": "from"}):
    """An entry of a price file."""

    # Model name, as used in requests.
    model: str
    input: Dollars
    output: Dollars
    cached_input: Dollars | None = None
    # First day (UTC) of this price. None: no start date.
    since: date | None = None
    max_output: _Tokens | None = None
    cache_write_input: Dollars | None = None
    cache_write_1h_input: Dollars | None = None

    @property
    def price(self) -> Price:
        writes = self.cache_write_input, self.cache_write_1h_input
        return Price(self.input, self.output, self.cached_input, self.max_output, *writes)


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    prices: list[DatedPrice]


class _PublicPrice(msgspec.Struct):
    """An entry of LiteLLM's price list, in US dollars per token."""

    input_cost_per_token: Dollars | None = None
    output_cost_per_token: Dollars | None = None
    cache_read_input_token_cost: Dollars | None = None
    cache_creation_input_token_cost: Dollars | None = None
    cache_creation_input_token_cost_above_1hr: Dollars | None = None
    max_output_tokens: Any = None


prepare_types(_Table, _PublicPrice)


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Prices by model, each with its first day, newest first."""

    models: Mapping[str, Sequence[tuple[date | None, Price]]]

    @classmethod
    def of(cls, prices: Sequence[DatedPrice]) -> PriceTable:
        models: dict[str, list[tuple[date | None, Price]]] = {}
        for entry in sorted(prices, key=lambda each: each.since or date.min, reverse=True):
            models.setdefault(entry.model, []).append((entry.since, entry.price))
        return cls(models)

    def at(self, model: str, when: float) -> Price | None:
        """Return a model's price at a time in seconds since the epoch, or None."""
        dated = self.models.get(model, ())
        day = datetime.fromtimestamp(when, UTC).date()
        return next((price for since, price in dated if since is None or since <= day), None)

    def priced_at(self, when: float) -> frozenset[str]:
        """Return the models that have a price at a time in seconds since the epoch."""
        return frozenset(model for model in self.models if self.at(model, when))


def load_prices(source: str) -> PriceTable:
    """Load a file or an https URL: TOML or JSON with `prices`, or LiteLLM's JSON. Raises ConfigurationError.

    `prices` is a list of entries, or the router's table `[prices.models."NAME"]`.
    """
    data = _bytes_of(source)
    try:
        try:
            table: Any = tomllib.loads(data.decode())
        except tomllib.TOMLDecodeError:
            if not data.lstrip().startswith(b"{"):
                raise
            msgspec.json.decode(data)  # stricter than `json.loads`, which accepts NaN
            table = json.loads(data, object_pairs_hook=_distinct)
        return PriceTable.of(_entries(table))
    except (tomllib.TOMLDecodeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = plain_words(error)
        raise ConfigurationError(f"The price table {source} is invalid: {why}.", param="prices") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises msgspec.ValidationError for a repeated name."""
    name, count = Counter(name for name, _ in pairs).most_common(1)[0] if pairs else ("", 0)
    if count > 1:
        raise msgspec.ValidationError(f"{name!r} occurs {count} times in one object: keep one")
    return dict(pairs)


def _entries(table: Any) -> Sequence[DatedPrice]:
    """Return the entries of a decoded table. Raises msgspec.ValidationError for an unknown format."""
    if not isinstance(table, dict) or not table:
        raise msgspec.ValidationError("the table has no prices: add [[prices]] entries with model, input and output")
    if "prices" not in table:
        public = _public(msgspec.convert(table, dict[str, _PublicPrice]))
        if not public:
            raise msgspec.ValidationError("no entry has input_cost_per_token and output_cost_per_token")
        return public
    fields = msgspec.convert(table, dict[str, Any])
    prices_table: Any = fields["prices"]
    if isinstance(prices_table, dict):
        models = msgspec.convert(prices_table, dict[str, dict[str, dict[str, Any]]])
        if set(models) != {"models"}:
            raise msgspec.ValidationError("prices must be a list of entries, or a table with the key models")
        prices_table = [{"model": name, **entry} for name, entry in models["models"].items()]
    prices = msgspec.convert({**fields, "prices": prices_table}, _Table).prices
    for (model, since), count in Counter((each.model, each.since) for each in prices).items():
        if count > 1:
            day = "" if since is None else f" from {since}"
            raise msgspec.ValidationError(f"the model {model!r} has {count} prices{day}: keep one")
    return prices


def _public(entries: Mapping[str, _PublicPrice]) -> list[DatedPrice]:
    prices: list[DatedPrice] = []
    for name, each in entries.items():
        if each.input_cost_per_token is None or each.output_cost_per_token is None:
            continue  # skip a model that is priced per image, second or page
        cached, write = each.cache_read_input_token_cost, each.cache_creation_input_token_cost
        write_1h, longest = each.cache_creation_input_token_cost_above_1hr, each.max_output_tokens
        prices.append(
            DatedPrice(
                name,
                each.input_cost_per_token * 1e6,
                each.output_cost_per_token * 1e6,
                _per_million(cached),
                max_output=longest if isinstance(longest, int) and longest > 0 else None,
                cache_write_input=_per_million(write),
                cache_write_1h_input=_per_million(write_1h),
            )
        )
    return prices


def _per_million(usd: float | None) -> float | None:
    return None if usd is None else usd * 1e6


def _bytes_of(source: str) -> bytes:
    try:
        return _fetched(source) if source.startswith("https://") else Path(source).read_bytes()
    except OSError as error:
        why = plain_words(error)
        raise ConfigurationError(f"The price table {source} cannot be read: {why}.", param="prices") from error


def _fetched(source: str) -> bytes:
    import httpx  # imported late, because local files need no HTTP client

    try:
        parts, size = list[bytes](), 0
        with httpx.stream("GET", source, timeout=_FETCH_S, follow_redirects=False) as response:
            response.raise_for_status()
            for part in response.iter_bytes():
                parts.append(part)
                size += len(part)
                if size > _MAX_BYTES:
                    raise ConfigurationError(f"The price table {source} is longer than {_MAX_BYTES} bytes.")
        return b"".join(parts)
    except httpx.HTTPError as error:
        raise ConfigurationError(f"The price table {source} cannot be read: {error}.", param="prices") from error
