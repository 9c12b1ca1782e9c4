"""Prices of tokens by model and first day: from a file of the operator's, or LiteLLM's public one."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from ....protocol.decoding import prepare_types
from ....protocol.errors import ConfigurationError

_MAX_BYTES = 64_000_000
_FETCH_S = 30.0
Dollars = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class DatedPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"since": "from"}):
    """US dollars per million tokens, from a day on."""

    # The model's name, as clients ask for it.
    model: str
    # Of a prompt.
    input: Dollars
    # Of an answer.
    output: Dollars
    # Of the part of a prompt that the node had in its cache. None: as any other part.
    cached_input: Dollars | None = None
    # The first day (UTC) of this price. None: always.
    since: date | None = None

    def of(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> float:
        cached = self.input if self.cached_input is None else self.cached_input
        fresh = max(0, prompt_tokens - cached_tokens)
        return (fresh * self.input + cached_tokens * cached + completion_tokens * self.output) / 1e6


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    prices: list[DatedPrice]


class _PublicPrice(msgspec.Struct):
    """An entry of LiteLLM's file, in US dollars per token."""

    input_cost_per_token: Dollars | None = None
    output_cost_per_token: Dollars | None = None
    cache_read_input_token_cost: Dollars | None = None


prepare_types(_Table, _PublicPrice)


@dataclass(frozen=True, slots=True)
class PriceTable:
    """The prices of all models; each model's latest first."""

    models: Mapping[str, Sequence[DatedPrice]]

    @classmethod
    def of(cls, prices: Sequence[DatedPrice]) -> PriceTable:
        models: dict[str, list[DatedPrice]] = {}
        for price in sorted(prices, key=lambda each: each.since or date.min, reverse=True):
            models.setdefault(price.model, []).append(price)
        return cls(models)

    def at(self, model: str, when: float) -> DatedPrice | None:
        """The price of a model at a time in seconds since the epoch. None: it has none."""
        found = self.models.get(model, ())
        if len(found) == 1 and found[0].since is None:
            return found[0]
        day = datetime.fromtimestamp(when, UTC).date()
        return next((price for price in found if price.since is None or price.since <= day), None)


def load_prices(source: str) -> PriceTable:
    """From a path or an https URL: TOML or JSON with `prices`, or LiteLLM's JSON. Raises ConfigurationError."""
    data = _bytes_of(source)
    try:
        try:
            table = tomllib.loads(data.decode())
        except tomllib.TOMLDecodeError:
            table = msgspec.json.decode(data)
        if isinstance(table, dict) and "prices" in table:
            return PriceTable.of(msgspec.convert(table, _Table).prices)
        return PriceTable.of(_public(msgspec.convert(table, dict[str, _PublicPrice])))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The price table {source} is unusable: {error}.", param="prices") from error


def _public(found: Mapping[str, _PublicPrice]) -> list[DatedPrice]:
    prices: list[DatedPrice] = []
    for name, each in found.items():
        if each.input_cost_per_token is None or each.output_cost_per_token is None:
            continue  # priced by the image, second or page
        cached = each.cache_read_input_token_cost
        prices.append(
            DatedPrice(
                name,
                each.input_cost_per_token * 1e6,
                each.output_cost_per_token * 1e6,
                None if cached is None else cached * 1e6,
            )
        )
    return prices


def _bytes_of(source: str) -> bytes:
    if source.startswith("https://"):
        return _fetched(source)
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"The price table {source} cannot be read: {error}.", param="prices") from error


def _fetched(source: str) -> bytes:
    import httpx  # not needed for files

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
    except (OSError, httpx.HTTPError) as error:
        raise ConfigurationError(f"The price table {source} cannot be read: {error}.", param="prices") from error
