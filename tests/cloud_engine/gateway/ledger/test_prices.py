"""Price tables: from when a price holds, what tokens cost, and what files may say."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.accounting.prices import DatedPrice, Price, PriceTable, load_prices
from updraft.protocol.errors import ConfigurationError

DAYS = st.dates(date(2020, 1, 1), date(2030, 1, 1))


@given(st.lists(DAYS, unique=True, max_size=6), DAYS)
def test_the_latest_price_that_has_begun_holds(begins: list[date], today: date) -> None:
    table = PriceTable.of([DatedPrice("m", input=1, output=day.toordinal(), since=day) for day in begins])
    dollars = table.at("m", datetime(today.year, today.month, today.day, 12, tzinfo=UTC).timestamp())
    begun = [day for day in begins if day <= today]
    assert (dollars.output if dollars else None) == (max(begun).toordinal() if begun else None)


def test_a_price_begins_at_midnight_of_utc() -> None:
    table = PriceTable.of([DatedPrice("m", 1, 1), DatedPrice("m", 2, 2, since=date(2026, 3, 1))])
    midnight = datetime(2026, 3, 1, tzinfo=UTC)
    for when, price in ((midnight - timedelta(seconds=1), 1), (midnight, 2)):
        dollars = table.at("m", when.timestamp())
        assert dollars is not None
        assert dollars.input == price
    assert table.at("other", 0) is None


def test_cached_tokens_have_a_price_of_their_own() -> None:
    assert Price(input=10, output=20, cached_input=1).of(1000, 100, 400) == pytest.approx(8.4e-3)
    assert Price(input=10, output=20).of(1000, 100, 400) == pytest.approx(12e-3)


def test_cache_writes_have_prices_of_their_own() -> None:
    """By default those of Anthropic: 1.25 times the input for 5 minutes, twice the input for an hour."""
    counts = 1000, 0, 100, 800, 300
    assert Price(input=10).of(*counts) == pytest.approx((100 * 10 + 100 * 10 + 500 * 12.5 + 300 * 20) / 1e6)
    price = Price(input=10, cached_input=1, cache_write_input=11, cache_write_1h_input=13)
    assert price.of(*counts) == pytest.approx((100 * 10 + 100 * 1 + 500 * 11 + 300 * 13) / 1e6)
    assert (Price(input=10).highest_input, Price(input=10).highest_stored_input) == (10, 20)
    assert (price.highest_input, price.highest_stored_input) == (13, 13)
    assert Price(input=10, cache_write_1h_input=4).highest_stored_input == 12.5
    with pytest.raises(ConfigurationError, match="cache_write_input"):
        Price(cache_write_input=-1)


def test_files(tmp_path: Path) -> None:
    """Ours as TOML and JSON, and the public one of LiteLLM, whose entries without token prices are left out."""
    ours = tmp_path / "prices.toml"
    ours.write_text('[[prices]]\nmodel = "m"\nfrom = 2026-01-01\ninput = 1\noutput = 2.5\ncached_input = 0.1\n')
    expected = PriceTable.of([DatedPrice("m", 1, 2.5, 0.1, date(2026, 1, 1))])
    assert load_prices(str(ours)) == expected
    entry = {"model": "m", "from": "2026-01-01", "input": 1, "output": 2.5, "cached_input": 0.1}
    ours.write_text(json.dumps({"prices": [entry]}))
    assert load_prices(str(ours)) == expected
    ours.write_text('[prices.models."m"]\ninput = 1\noutput = 2.5\ncached_input = 0.1\nmax_output = 9\n')
    assert load_prices(str(ours)).at("m", 0) == Price(1, 2.5, 0.1, 9), "the router's settings"
    public = {
        "sample_spec": {"mode": "chat", "max_tokens": "a text"},
        "m": {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6, "litellm_provider": "x"},
        "image": {"output_cost_per_image": 0.02},
    }
    ours.write_text(json.dumps(public))
    assert load_prices(str(ours)) == PriceTable.of([DatedPrice("m", 1.0, 2.0)])
    writes = {"cache_creation_input_token_cost": 1.5e-6, "cache_creation_input_token_cost_above_1hr": 3e-6}
    ours.write_text(json.dumps({"m": {**public["m"], **writes}}))
    price = load_prices(str(ours)).at("m", 0)
    assert price is not None and price.cache_write_input == pytest.approx(1.5)
    assert price.cache_write_1h_input == pytest.approx(3)
    ours.write_text(json.dumps(public))
    assert load_prices(str(ours)) == PriceTable.of([DatedPrice("m", 1.0, 2.0)])


@pytest.mark.parametrize(
    "text",
    [
        *("[", "[[prices]]\nmodel = 'm'\n", "[[prices]]\nmodel = 'm'\ninput = -1\noutput = 1\n", '{"m": 3}', "\x00"),
        *("", "[]", "3", '"x"', "{}", "prices = 3", "[prices]\ninput = 1", "[prices.models]\nm = 3"),
        *('{"m": {"mode": "chat"}}', "[prices.models.m]\ninput = 1"),
        *(f"[[prices]]\nmodel = 'm'\n{rest}" for rest in ("input = 1\noutput = 1\nout = 1", "input = nan\noutput = 1")),
    ],
)
def test_a_file_that_is_unusable_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prices"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match="prices"):
        load_prices(str(file))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_prices(str(tmp_path / "missing"))


def test_a_syntax_error_in_toml_is_told(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text("[[prices]]\nmodel = \n")
    with pytest.raises(ConfigurationError, match=r"not valid TOML: Invalid value \(at line 2"):
        load_prices(str(file))


@pytest.mark.parametrize("text", ['{"m": %s, "m": %s}', '{"prices": {"models": {"m": %s, "m": %s}}}'])
def test_json_that_names_a_model_twice_is_refused(tmp_path: Path, text: str) -> None:
    public, ours = '{"input_cost_per_token": 1, "output_cost_per_token": 1}', '{"input": 1, "output": 1}'
    file = tmp_path / "prices.json"
    file.write_text(text % ((ours if "models" in text else public,) * 2))
    with pytest.raises(ConfigurationError, match=r"prices\.json .*'m' occurs 2 times"):
        load_prices(str(file))


@pytest.mark.parametrize("day", ["", "from = 2026-01-01\n"])
def test_two_prices_of_one_model_and_day_are_refused_by_name(tmp_path: Path, day: str) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(f"[[prices]]\nmodel = 'm'\ninput = 1\noutput = 1\n{day}" * 2)
    with pytest.raises(ConfigurationError, match=r"prices\.toml .* the model 'm' has 2 prices"):
        load_prices(str(file))
