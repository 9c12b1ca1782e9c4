"""What a user may set about the router: one TOML file, `UPDRAFT_*` variables, keyword overrides; the last one wins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import msgspec

from ..classifier.aim import Aim, Promise
from ..classifier.folders import experience_file
from ..protocol import settings
from ..protocol.errors import ConfigurationError
from .accounting.budget import Limits
from .accounting.prices import Price, Prices
from .privacy.rules import Privacy
from .request.json_narrowing import rows, table
from .responses.cache import CacheSettings


@dataclass(frozen=True, slots=True)
class Middle:
    """One cloud between the device and the best one. `skip_above`: a P(gain) from which on it is not asked.

    `price`: of its tokens, as in `prices.models`. `continues`: as `cloud_continues`.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    price: Price | None = None
    skip_above: float | None = None
    continues: bool = False

    def __post_init__(self) -> None:
        _check(bool(self.model), "middle.model", "the name of a model")
        _check(self.skip_above is None or 0 <= self.skip_above <= 1, "middle.skip_above", "from 0 to 1")
        object.__setattr__(self, "url", _base_url(self.url, "middle.url", "middle.api_key"))


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of one router. `RouterConfig(...)` takes exactly what it is given; `load()` adds the user's own.

    local: `"pocket"` (the model in the package), the path of a GGUF file, the name of a pulled model, or None for no
    local tier.
    cloud_url: an OpenAI-compatible base URL (`/v1` is added to a bare host), or None for no cloud tier.
    cloud_continues: whether the cloud goes on with an assistant's last message (`continue_final_message`), as Updraft's
    own, vLLM and SGLang do. Only then is a stream shown before it is judged: others would begin it anew.
    middle: smaller clouds to ask before that one, from the smallest up.
    quality, cloud_share, cost: the target, one of them at most (0.98 quality without any). `quality`: share of the
    cloud's quality to keep, in (0, 1]; `cloud_share`: at most this share of the requests goes up; `cost`: at most this
    many US dollars go to the cloud per 1,000 requests, by `prices`.
    promise: `"confidence"`, the target holds with the confidence of the calibration; `"mean"`, on average over
    calibrations, which sends up less (docs/routing.md).
    policy: `"auto"` (the policy that `updraft calibrate` wrote for this pair, or the packaged one of the pocket pair,
    else the general policy with token confidence), `"none"` (token confidence), or a policy folder, which must have
    been calibrated for this pair unless `allow_foreign_policy` is set.
    confidence: without a policy, escalate when the geometric mean token probability falls below this.
    hold_tokens: stream after this many local tokens, where `cloud_continues`; None holds the stream until the whole
    answer was judged.
    race_above: start the cloud beside the device where P(gain) before generation is at least this (0: always); None:
    never.
    ledger: SQLite file with one row per request; None keeps none.
    budget, budget_per_key, budget_per_user: what may be spent on the cloud in a day, by all requests together, by those
    of one API key, and by those of one `user` of a key. They are kept in the ledger and need one.
    privacy: rules that keep a request on the device.
    cache: answers to keep for requests that ask exactly the same again; none by default.
    experience: SQLite file with what judged answers teach, features only unless `experience_text` is set; None keeps
    none. exploration: share of the requests, drawn by a coin, that both tiers answer, so that labels are not only of
    what goes up anyway. shadow: decide and log, but send every answer to the cloud.
    second_sample: where gate 3 is undecided the device answers once more, sampled, and the two answers are compared;
    needs a policy that was calibrated with second samples (docs/routing.md).
    """

    local: str | None = "pocket"
    cloud_url: str | None = None
    cloud_api_key: str | None = field(default=None, repr=False)
    cloud_model: str = "pocket-large"
    cloud_continues: bool = False
    middle: tuple[Middle, ...] = ()
    quality: float | None = None
    cloud_share: float | None = None
    cost: float | None = None
    promise: Promise = "confidence"
    policy: str = "auto"
    allow_foreign_policy: bool = False
    confidence: float = 0.8
    hold_tokens: int | None = None
    race_above: float | None = None
    offline: bool = False
    cloud_timeout_s: float = 60.0
    cloud_connect_timeout_s: float = 2.0
    prices: Prices = field(default_factory=Prices)
    ledger: Path | None = None
    budget: Limits = field(default_factory=Limits)
    budget_per_key: Limits = field(default_factory=Limits)
    budget_per_user: Limits = field(default_factory=Limits)
    privacy: Privacy = field(default_factory=Privacy)
    cache: CacheSettings = field(default_factory=CacheSettings)
    experience: Path | None = None
    experience_text: bool = False
    exploration: float = 0.0
    shadow: bool = False
    second_sample: bool = False

    def __post_init__(self) -> None:
        _ = self.aim  # raises if it is none
        _check(0 <= self.exploration <= 1, "exploration", "a share from 0 to 1")
        _check(0 < self.confidence < 1, "confidence", "between 0 and 1")
        _check(self.hold_tokens is None or self.hold_tokens >= 1, "hold_tokens", "at least 1")
        _check(self.race_above is None or 0 <= self.race_above <= 1, "race_above", "from 0 to 1")
        _check(self.cloud_timeout_s > 0, "cloud_timeout_s", "above 0 seconds")
        _check(self.cloud_connect_timeout_s > 0, "cloud_connect_timeout_s", "above 0 seconds")
        _check(bool(self.cloud_model), "cloud_model", "the name of the cloud's model")
        if self.cloud_url is not None:
            object.__setattr__(self, "cloud_url", _base_url(self.cloud_url, "cloud_url", "cloud_api_key"))
        _check(self.cloud_url is not None or not self.middle, "cloud_url", "set where there are middle tiers")
        names = [self.cloud_model, *(each.model for each in self.middle)]
        _check(len(set(names)) == len(names), "middle.model", "another name in each tier")
        priced = {each.model: each.price for each in self.middle if each.price is not None}
        if priced:
            prices = replace(self.prices, models={**self.prices.models, **priced})
            object.__setattr__(self, "prices", prices)
        limited = any((self.budget, self.budget_per_key, self.budget_per_user))
        _check(self.ledger is not None or not limited, "ledger", "a file, since a budget is kept in it")

    @property
    def aim(self) -> Aim:
        """The target. Raises ConfigurationError if there are several, or if it is out of range."""
        aim = Aim.of(self.quality, self.cloud_share, self.cost)
        price = self.prices.of_cloud(self.cloud_model)
        return replace(aim, prices=(price.input, price.output), promise=self.promise)

    @staticmethod
    def load(
        overrides: Mapping[str, Any] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        file: Path | None = None,
    ) -> RouterConfig:
        """The user's settings: TOML file, then `UPDRAFT_*`, then `overrides` (as `RouterConfig` fields; tables
        such as `prices` may be mappings). Ledger and experience are on by default, in the state folder. Raises
        ConfigurationError.
        """
        path = settings.config_file() if file is None else file
        values: dict[str, Any] = {
            "ledger": settings.state_folder() / "ledger.sqlite3",
            "experience": experience_file(),
        }
        _merge(values, settings.read_toml(path), str(path))
        _merge(values, _listed(_nested(settings.environment(environ))), "the environment (UPDRAFT_*)")
        _merge(values, dict(overrides or {}), "the options")
        promise = values.pop("promise", "confidence")  # set apart: msgspec would not say which promises there are
        try:
            return replace(msgspec.convert(values, RouterConfig, strict=False, dec_hook=_decode), promise=promise)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"Invalid setting: {error}") from error


_KNOWN = tuple(item.name for item in fields(RouterConfig))
# The settings that are tables. In the environment `UPDRAFT_PRICES_CLOUD_INPUT` is `cloud_input` of `prices`.
_TABLES: dict[str, type[Any]] = {
    "prices": Prices,
    "budget_per_key": Limits,
    "budget_per_user": Limits,
    "privacy": Privacy,
    "cache": CacheSettings,
    "budget": Limits,  # after those whose names begin with it
}
TARGETS = ("quality", "cloud_share", "cost")
_OPTIONAL = frozenset(
    {"local", "cloud_url", "cloud_api_key", "hold_tokens", "race_above", "ledger", "experience", *TARGETS}
)


def _merge(into: dict[str, Any], update: dict[str, Any], source: str) -> None:
    _refuse_unknown(update, _KNOWN, source)
    if any(update.get(name) is not None for name in TARGETS):  # a target replaces the one of an earlier source
        into.update(dict.fromkeys(TARGETS))
    for name, value in update.items():
        if name == "middle":
            into[name] = _middle(value, source)
        elif name in _TABLES:
            given = _table(value, _TABLES[name], f"{name} in {source}")
            into[name] = {**into.get(name, {}), **given}
        else:
            into[name] = None if name in _OPTIONAL and value in ("", "none") else value
    for model, price in (table(into.get("prices", {}).get("models")) or {}).items():
        _table(price, Price, f"prices.models.{model} in {source}")


def _middle(value: Any, source: str) -> list[dict[str, Any]]:
    given = rows(list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value)
    if given is None:
        raise ConfigurationError(f"middle in {source} must be a list of tables ([[middle]]).")
    return [_table(each, Middle, f"middle in {source}") for each in given]


def _table(value: Any, kind: type[Any], source: str) -> dict[str, Any]:
    known = tuple(item.name for item in fields(kind))
    if isinstance(value, kind):
        return {name: getattr(value, name) for name in known}
    given = table(value)
    if given is None:
        raise ConfigurationError(f"{source} must be a table of {', '.join(known)}.")
    _refuse_unknown(given, known, source)
    return given


def _refuse_unknown(given: Iterable[str], known: tuple[str, ...], source: str) -> None:
    if unknown := sorted(set(given) - set(known)):
        raise ConfigurationError(f"Unknown setting {', '.join(unknown)} in {source}. Known: {', '.join(known)}.")


def _nested(flat: dict[str, str]) -> dict[str, Any]:
    """`{"prices_cloud_input": "1"}` -> `{"prices": {"cloud_input": "1"}}`: variables have no tables."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        found = next((table_name for table_name in _TABLES if name.startswith(f"{table_name}_")), None)
        if found is None or name in _KNOWN:
            nested[name] = value
        else:
            nested.setdefault(found, {})[name.removeprefix(f"{found}_")] = value
    return nested


def _listed(given: dict[str, Any]) -> dict[str, Any]:
    """Names in a variable are apart by commas: `UPDRAFT_PRIVACY_BUILTIN=email,iban`."""
    privacy = table(given.get("privacy"))
    if privacy is None or "builtin" not in privacy:
        return given
    names = [name.strip() for name in privacy["builtin"].split(",")]
    return {**given, "privacy": {**privacy, "builtin": [name for name in names if name]}}


def _decode(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value).expanduser()
    raise ValueError(f"expected {kind.__name__}, got {value!r}")


def _base_url(url: str, name: str, key: str) -> str:
    import httpx

    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigurationError(f"{name} {url!r} is not a URL: {error}", param=name) from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigurationError(f"{name} {url!r} must start with http:// or https://.", param=name)
    if parsed.userinfo:
        raise ConfigurationError(f"{name} must hold no credentials: set {key} instead.", param=name)
    path = parsed.path.rstrip("/") or "/v1"
    return str(parsed.copy_with(path=path, query=None, fragment=None))


def _check(holds: bool, name: str, wanted: str) -> None:
    if not holds:  # NaN fails every comparison, so it lands here too
        raise ConfigurationError(f"{name} must be {wanted}.", param=name)
