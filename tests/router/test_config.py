"""Settings: where they come from, which one wins, and what is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import updraft
from updraft.accounting.reported_usage import ReportedUsage
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.settings import PROCESS_VARIABLES
from updraft.router.accounting.budget import BudgetLimits
from updraft.router.accounting.prices import Prices
from updraft.router.config import RouterConfig
from updraft.router.settings_sources import load_config, read_settings


def load(tmp_path: Path, toml: str = "", env: dict[str, str] | None = None, **overrides: Any) -> RouterConfig:
    file = tmp_path / "config.toml"
    file.write_text(toml)
    return load_config(overrides, environ=env or {}, file=file)


def test_the_last_source_wins(tmp_path: Path) -> None:
    toml = 'cloud_model = "file"\nquality = 0.5\nhold_tokens = 3\n[prices]\ncloud_input = 2\n'
    env = {"UPDRAFT_CLOUD_MODEL": "env", "UPDRAFT_QUALITY": "0.6", "UPDRAFT_PRICES_CLOUD_OUTPUT": "4", "PATH": "/bin"}
    config = load(tmp_path, toml, env, quality=0.7)
    assert (config.cloud_model, config.quality, config.hold_tokens) == ("env", 0.7, 3)
    assert config.prices == Prices(cloud_input=2.0, cloud_output=4.0)


@pytest.mark.parametrize("name", PROCESS_VARIABLES)
def test_a_variable_of_another_package_is_not_a_setting(name: str, tmp_path: Path) -> None:
    assert load(tmp_path, "", {name: "x"}) == load(tmp_path, "", {})


KEPT = 'cloud_url = "https://mine/v1"\ncloud_model = "big"\n'


@pytest.mark.parametrize("key", ['cloud_api_key = "sk-mine"\n', 'cloud_api_key_file = "{file}"\n'])
def test_a_key_is_not_sent_to_a_url_of_a_nearer_source(key: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-mine")
    toml = KEPT + key.format(file=tmp_path / "key")
    assert load(tmp_path, toml).cloud_api_key == "sk-mine"
    assert load(tmp_path, toml, cloud_url="https://mine/v1").cloud_api_key == "sk-mine"
    assert load(tmp_path, toml, cloud_model="other").cloud_api_key == "sk-mine"
    assert load(tmp_path, toml, cloud_url="https://other/v1").cloud_api_key is None
    assert load(tmp_path, toml, {"UPDRAFT_CLOUD_URL": "https://other/v1"}).cloud_api_key is None
    assert load(tmp_path, toml, cloud_url="https://other/v1", cloud_api_key="sk-2").cloud_api_key == "sk-2"


def test_a_key_of_the_environment_is_not_for_a_url_of_an_argument(tmp_path: Path) -> None:
    env = {"UPDRAFT_CLOUD_API_KEY": "sk-env"}
    assert load(tmp_path, KEPT, env).cloud_api_key == "sk-env"
    assert load(tmp_path, KEPT, env, cloud_url="https://other/v1").cloud_api_key is None
    env["UPDRAFT_CLOUD_URL"] = "https://env/v1"
    assert load(tmp_path, KEPT, env).cloud_api_key == "sk-env"


def test_a_key_in_a_file(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("sk-1\n")
    toml = f'cloud_api_key_file = "{key_file}"\n'
    config = load(tmp_path, toml)
    assert config.cloud_api_key == "sk-1"
    assert "sk-1" not in repr(config)
    key_file.write_bytes(b"\xef\xbb\xbfsk-1\r\n")
    assert load(tmp_path, toml).cloud_api_key == "sk-1", "as editors on Windows write it"
    assert load(tmp_path, toml, {"UPDRAFT_CLOUD_API_KEY": "sk-2"}).cloud_api_key == "sk-2"
    assert load(tmp_path, toml, {"UPDRAFT_CLOUD_API_KEY_FILE": "none"}).cloud_api_key is None
    for content, message in ((b"", "is empty"), (b"\xff", "line 1: not UTF-8"), (None, "cannot be read")):
        key_file.unlink() if content is None else key_file.write_bytes(content)
        with pytest.raises(ConfigurationError, match=message):
            load(tmp_path, toml)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_settings_in_a_pipe_are_refused(tmp_path: Path) -> None:
    """A second read would wait for ever."""
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(ConfigurationError, match="is a pipe"):
        read_settings(tmp_path / "config.toml")


def test_tables(tmp_path: Path) -> None:
    toml = """
        [prices.models."big-1"]
        input = 2
        output = 8
        [budget]
        usd = 5
        cloud_share = 0.3
        [budget_per_key]
        cloud_tokens = 1000
    """
    env = {"UPDRAFT_BUDGET_USD": "6", "UPDRAFT_BUDGET_PER_KEY_USD": "1.5"}
    config = load(tmp_path, toml, env, budget_per_user=BudgetLimits(cloud_share=0.5))
    assert config.budget == BudgetLimits(usd=6.0, cloud_share=0.3)
    assert config.budget_per_key == BudgetLimits(usd=1.5, cloud_tokens=1000)
    assert config.budget_per_user == BudgetLimits(cloud_share=0.5)
    assert config.prices.cloud("big-1", ReportedUsage(1_000_000, 1_000_000)) == 10.0
    assert config.prices.cloud("other", ReportedUsage(1_000_000, 1_000_000)) is None


def test_middle_tiers(tmp_path: Path) -> None:
    toml = """
        cloud_url = "http://top"
        cloud_model = "large"
        [[middle_tiers]]
        url = "http://m"
        model = "medium"
        api_key = "sk-secret"
        skip_above = 0.8
        [middle_tiers.price]
        input = 0.1
        output = 0.2
    """
    config = load(tmp_path, toml)
    (medium,) = config.middle_tiers
    assert (medium.url, medium.model, medium.api_key, medium.skip_above) == ("http://m/v1", "medium", "sk-secret", 0.8)
    assert config.prices.cloud("medium", ReportedUsage(1_000_000, 0)) == pytest.approx(0.1)
    assert "sk-secret" not in repr(config)
    assert load(tmp_path, toml, middle_tiers=()).middle_tiers == ()
    assert load(tmp_path, 'cloud_url = "http://top"\ncloud_model = "large"', middle_tiers=(medium,)).middle_tiers == (
        medium,
    )


def test_variables_are_converted_and_can_unset(tmp_path: Path) -> None:
    env = {"UPDRAFT_OFFLINE": "true", "UPDRAFT_LOCAL": "none", "UPDRAFT_HOLD_TOKENS": "", "UPDRAFT_LEDGER": "~/x.db"}
    config = load(tmp_path, "hold_tokens = 4", env)
    assert config.offline is True
    assert config.local is None
    assert config.hold_tokens is None
    assert config.ledger == Path.home() / "x.db"


def test_home_moves_file_and_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text('cloud_url = "http://127.0.0.1:9"\ncloud_model = "large"')
    config = load_config()
    assert config.cloud_url == "http://127.0.0.1:9/v1"
    assert config.ledger == tmp_path / "ledger.sqlite3"
    assert RouterConfig().ledger is None, "only load() reaches for the user's folders"


@pytest.mark.parametrize(
    ("toml", "env", "overrides", "message"),
    [
        ("qualty = 1", {}, {}, r"Closest: quality, \w+, \w+\. All settings: docs/\S+settings.md\.$"),
        ("", {"UPDRAFT_CLOUD_ULR": "x"}, {}, "Unknown setting cloud_ulr in the environment"),
        ("", {}, {"clod": 1}, "Unknown setting clod in the options"),
        ("[prices]\ncloud = 1", {}, {}, "Closest: cloud_input"),
        ("prices = 3", {}, {}, "prices in .* must be a table"),
        ("quality = ", {}, {}, "not valid TOML"),
        (f"quality = {'{x = ' * 3000}1{'}' * 3000}", {}, {}, "is nested too deeply"),
        (f"quality = {'[' * 3000}{']' * 3000}", {}, {}, "is nested too deeply"),
        ("", {"UPDRAFT_QUALITY": "high"}, {}, "Invalid setting.*quality"),
        ("quality = 1.5", {}, {}, "quality must be above 0"),
        ("", {"UPDRAFT_PROMISE": "average"}, {}, r"^promise must be net or no-loss or mean, not average\.$"),
        ('confidence_signal = "perplexity"', {}, {}, r"^confidence_signal must be probability, entropy or margin\.$"),
        ("promise = 3", {}, {}, r"^promise must be net or no-loss or mean, not 3\.$"),
        ("quality = nan", {}, {}, "quality must be above 0"),
        (
            "cost = 1\n[prices]\ncloud_input = 0\ncloud_output = 0",
            {},
            {},
            "cost needs the price of the cloud's tokens",
        ),
        ("hold_tokens = 0", {}, {}, "hold_tokens must be at least 1"),
        ("cloud_timeout_s = 0", {}, {}, "cloud_timeout_s"),
        ("[prices]\ncloud_input = -1", {}, {}, "prices.cloud_input"),
        ("[prices.models.m]\nin = 1", {}, {}, "Unknown setting in in prices.models.m"),
        ("[prices.models.good]\n[prices.models.m]\ninput = true", {}, {}, "`prices.models.m.input` must be a number"),
        ("[prices.models.m]\ninput = -1", {}, {}, "`prices.models.m.input` must be at least 0"),
        ("[prices]\ncloud_input = inf", {}, {}, "prices.cloud_input must be 0 or more, and at most 1e.09"),
        ("[prices.models.m]\noutput = 1e300", {}, {}, "`prices.models.m.output` must be at most 1000000000"),
        ("[budget]\neur = 1", {}, {}, "Unknown setting eur in budget in"),
        ("[budget]\nusd = -1", {}, {}, "budget.usd must be 0 or more"),
        ("", {"UPDRAFT_BUDGET_USD": "inf"}, {}, "budget.usd must be 0 or more, and finite"),
        ("", {"UPDRAFT_BUDGET_USD": "nan"}, {}, "budget.usd must be 0 or more, and finite"),
        ("", {"UPDRAFT_CLOUD_TIMEOUT_S": "inf"}, {}, "cloud_timeout_s must be above 0 seconds, and finite"),
        ("cloud_connect_timeout_s = inf", {}, {}, "cloud_connect_timeout_s must be above 0 seconds, and finite"),
        ("local_idle_s = inf", {}, {}, "local_idle_s must be at least 1 second, and finite"),
        ("", {"UPDRAFT_LEDGER": ":memory:"}, {}, "^ledger must be the path of a file, or none to turn the ledger off"),
        ('ledger = "file:ledger?mode=memory"', {}, {}, "^ledger must be the path of a file"),
        ("middle = 5", {}, {}, "`middle` in .* is now `middle_tiers`"),
        ("", {"UPDRAFT_TOOL_PARSER": "hermes"}, {}, "`tool_parser` in .* is now `tool_call_parser`"),
        ('promise = "confidence"', {}, {}, 'is now promise = "no-loss"'),
        ('promise = "level"', {}, {}, 'is now promise = "no-loss"'),
        ("middle_tiers = 5", {}, {}, "must be a list of tables"),
        ('[[middle_tiers]]\nurl = "http://m"\nmodel = "m"\nkey = "k"', {}, {}, "Unknown setting key in middle_tiers"),
        ('[[middle_tiers]]\nurl = "http://m"\nmodel = "m"', {}, {}, "cloud_url must be set if there are middle tiers"),
        (
            'cloud_url = "http://t"\n[[middle_tiers]]\nurl = "ftp://m"\nmodel = "m"',
            {},
            {},
            "tiers.url .* must start with",
        ),
        (
            'cloud_url = "http://t"\ncloud_model = "m"\n[[middle_tiers]]\nurl = "http://m"\nmodel = "m"',
            {},
            {},
            "a different name",
        ),
        ("budget = 5", {}, {}, "budget in .* must be a table of usd"),
        ("", {"UPDRAFT_BUDGET_EUR": "1"}, {}, "Unknown setting eur in budget in the environment"),
        ('cloud_url = "localhost:1"', {}, {}, "must start with http"),
        ('cloud_url = "https://host"', {}, {}, "cloud_model must be set with cloud_url"),
        ("confidence = 1", {}, {}, "confidence must be between 0 and 1"),
        ("", {"UPDRAFT_CONFIDENCE": "0.8"}, {"confidence": 0.7, "cost": 1.0}, "cost and confidence exclude each other"),
        ('cloud_url = "https://key@host"', {}, {}, "must not contain credentials"),
        ('cloud_url = "http://xn--/v1"', {}, {}, "cloud_url .* is not a URL"),
        ('local = "http://xn--/v1"', {}, {}, "local .* is not a URL"),
        ('cloud_url = "http://h:65536/v1"', {}, {}, "cloud_url .* is not a URL"),
        ('cloud_url = "http://h:1?x=1"', {}, {}, "cloud_url must end .* Set cloud_query"),
        ('cloud_url = "http://h/v1#f"', {}, {}, "cloud_url must end"),
        (
            '[[middle_tiers]]\nurl = "http://m?x=1"\nmodel = "m"',
            {},
            {},
            "tiers.url must end .* Set middle_tiers.query",
        ),
    ],
)
def test_invalid_settings_are_refused(
    tmp_path: Path, toml: str, env: dict[str, str], overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(tmp_path, toml, env, **overrides)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"quality": "0.9"}, "quality must be a number, above 0 and at most 1, not '0.9'."),
        ({"cloud_share": [0.1]}, "cloud_share must be a number, from 0 to 1, not [0.1]."),
        ({"cost": "1"}, "cost must be a number, 0 or more US dollars per 1,000 requests, not '1'."),
    ],
)
def test_a_target_that_is_no_number(target: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        RouterConfig(**target)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("https://h/openai/v1/", "https://h/openai/v1"),
        ("http://[::1]:8/v1", "http://[::1]:8/v1"),
    ],
)
def test_cloud_url_is_a_base_url(given: str, used: str) -> None:
    assert RouterConfig(cloud_url=given, cloud_model="big").cloud_url == used


def test_the_key_is_never_shown() -> None:
    assert "sk-secret" not in repr(RouterConfig(cloud_api_key="sk-secret"))


def test_a_named_file_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong path in UPDRAFT_CONFIG would switch the user's privacy rules and budgets off without a word."""
    monkeypatch.setenv("UPDRAFT_CONFIG", str(tmp_path / "confg.toml"))
    with pytest.raises(ConfigurationError, match="does not exist, but UPDRAFT_CONFIG names it"):
        load_config()
    with pytest.raises(ConfigurationError, match="UPDRAFT_CONFIG"):
        updraft.OpenAI(cloud_url="http://127.0.0.1:9/v1")
    (tmp_path / "confg.toml").write_text("")
    load_config()


@pytest.mark.parametrize(("given", "expected"), [("email", ("email",)), ("email, iban,", ("email", "iban")), ("", ())])
def test_a_list_in_a_variable_has_commas(tmp_path: Path, given: str, expected: tuple[str, ...]) -> None:
    environ = {"UPDRAFT_PRIVACY_BUILTIN": given}
    assert load_config(environ=environ, file=tmp_path / "none.toml").privacy.builtin == expected


def test_the_store_is_a_switch_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    kept = tmp_path / "answers.sqlite3"
    assert [load(tmp_path, toml).store for toml in ("", "store = false", "store = true")] == [None, None, kept]
    assert load(tmp_path, "store = true", {"UPDRAFT_STORE": "none"}).store is None
    config = load(tmp_path, env={"UPDRAFT_STORE": "~/kept.db", "UPDRAFT_STORE_DAYS": "3"})
    assert (config.store, config.store_days) == (Path.home() / "kept.db", 3)
    for name in ("store_days", "store_answers"):
        with pytest.raises(ConfigurationError, match="at least 1"):
            load(tmp_path, f"{name} = 0")


def test_fallback_is_one_of_three(tmp_path: Path) -> None:
    for word in ("unreachable", "any", "never"):
        assert load_config({"fallback": word}, environ={}, file=tmp_path / "none.toml").fallback == word
    with pytest.raises(ConfigurationError, match="unreachable, any or never"):
        load_config({}, environ={"UPDRAFT_FALLBACK": "sometimes"}, file=tmp_path / "none.toml")
