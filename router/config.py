"""What a user may set about the router: one TOML file, `UPDRAFT_*` variables, keyword overrides; the last one wins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from ..classifier.aim import Aim
from ..classifier.folders import experience_file
from ..protocol import settings
from ..protocol.errors import ConfigurationError
from .loose import table


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars per million tokens. By default the device is free, the cloud at the price of a mid-size model."""

    local_input: float = 0.0
    local_output: float = 0.0
    cloud_input: float = 0.5
    cloud_output: float = 1.5

    def __post_init__(self) -> None:
        for price in fields(self):
            _check(getattr(self, price.name) >= 0, f"prices.{price.name}", "0 or more")

    def local(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (prompt_tokens * self.local_input + completion_tokens * self.local_output) / 1e6

    def cloud(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (prompt_tokens * self.cloud_input + completion_tokens * self.cloud_output) / 1e6


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of one router. `RouterConfig(...)` takes exactly what it is given; `load()` adds the user's own.

    local: `"pocket"` (the model in the package), the path of a GGUF file, the name of a pulled model, or None for no
    local tier.
    cloud_url: an OpenAI-compatible base URL (`/v1` is added to a bare host), or None for no cloud tier.
    quality, cloud_share, cost: the target, one of them at most (0.98 quality without any). `quality`: share of the
    cloud's quality to keep, in (0, 1]; `cloud_share`: at most this share of the requests goes up; `cost`: at most this
    many US dollars go to the cloud per 1,000 requests, by `prices`.
    policy: `"auto"` (the policy that `updraft calibrate` wrote for this pair, or the packaged one of the pocket pair,
    else the general policy with token confidence), `"none"` (token confidence), or a policy folder, which must have
    been calibrated for this pair unless `allow_foreign_policy` is set.
    confidence: without a policy, escalate when the geometric mean token probability falls below this.
    hold_tokens: stream after this many local tokens; None holds the stream until the whole answer was judged.
    ledger: SQLite file with one row per request; None keeps none.
    experience: SQLite file with what judged answers teach, features only unless `experience_text` is set; None keeps
    none. exploration: share of the answers that would stay, which go to the cloud all the same, so that labels are not
    only of what goes up anyway. shadow: decide and log, but send every answer to the cloud.
    """

    local: str | None = "pocket"
    cloud_url: str | None = None
    cloud_api_key: str | None = field(default=None, repr=False)
    cloud_model: str = "pocket-large"
    quality: float | None = None
    cloud_share: float | None = None
    cost: float | None = None
    policy: str = "auto"
    allow_foreign_policy: bool = False
    confidence: float = 0.8
    hold_tokens: int | None = None
    offline: bool = False
    cloud_timeout_s: float = 60.0
    cloud_connect_timeout_s: float = 2.0
    prices: Prices = field(default_factory=Prices)
    ledger: Path | None = None
    experience: Path | None = None
    experience_text: bool = False
    exploration: float = 0.0
    shadow: bool = False

    def __post_init__(self) -> None:
        _ = self.aim  # raises if it is none
        _check(0 <= self.exploration <= 1, "exploration", "a share from 0 to 1")
        _check(0 < self.confidence < 1, "confidence", "between 0 and 1")
        _check(self.hold_tokens is None or self.hold_tokens >= 1, "hold_tokens", "at least 1")
        _check(self.cloud_timeout_s > 0, "cloud_timeout_s", "above 0 seconds")
        _check(self.cloud_connect_timeout_s > 0, "cloud_connect_timeout_s", "above 0 seconds")
        _check(bool(self.cloud_model), "cloud_model", "the name of the cloud's model")
        if self.cloud_url is not None:
            object.__setattr__(self, "cloud_url", _base_url(self.cloud_url))

    @property
    def aim(self) -> Aim:
        """The target. Raises ConfigurationError if there are several, or if it is out of range."""
        aim = Aim.of(self.quality, self.cloud_share, self.cost)
        return replace(aim, prices=(self.prices.cloud_input, self.prices.cloud_output))

    @staticmethod
    def load(
        overrides: Mapping[str, Any] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        file: Path | None = None,
    ) -> RouterConfig:
        """The user's settings: TOML file, then `UPDRAFT_*`, then `overrides` (as `RouterConfig` fields; `prices` may
        be a mapping). Ledger and experience are on by default, in the state folder. Raises ConfigurationError.
        """
        path = settings.config_file() if file is None else file
        values: dict[str, Any] = {
            "ledger": settings.state_folder() / "ledger.sqlite3",
            "experience": experience_file(),
            "prices": {},
        }
        _merge(values, settings.read_toml(path), str(path))
        _merge(values, _nested(settings.environment(environ)), "the environment (UPDRAFT_*)")
        _merge(values, dict(overrides or {}), "the options")
        try:
            return msgspec.convert(values, RouterConfig, strict=False, dec_hook=_decode)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"Invalid setting: {error}") from error


_KNOWN = tuple(item.name for item in fields(RouterConfig))
_KNOWN_PRICES = tuple(item.name for item in fields(Prices))
TARGETS = ("quality", "cloud_share", "cost")
_OPTIONAL = frozenset({"local", "cloud_url", "cloud_api_key", "hold_tokens", "ledger", "experience", *TARGETS})


def _merge(into: dict[str, Any], update: dict[str, Any], source: str) -> None:
    _refuse_unknown(update, _KNOWN, source)
    if any(update.get(name) is not None for name in TARGETS):  # a target replaces the one of an earlier source
        into.update(dict.fromkeys(TARGETS))
    prices: Any = update.pop("prices", None)
    if isinstance(prices, Prices):
        prices = {name: getattr(prices, name) for name in _KNOWN_PRICES}
    if prices is not None:
        given = table(prices)
        if given is None:
            raise ConfigurationError(f"prices in {source} must be a table of {', '.join(_KNOWN_PRICES)}.")
        _refuse_unknown(given, _KNOWN_PRICES, f"prices in {source}")
        into["prices"].update(given)
    into.update(
        {name: None if name in _OPTIONAL and value in ("", "none") else value for name, value in update.items()}
    )


def _refuse_unknown(given: Iterable[str], known: tuple[str, ...], source: str) -> None:
    if unknown := sorted(set(given) - set(known)):
        raise ConfigurationError(f"Unknown setting {', '.join(unknown)} in {source}. Known: {', '.join(known)}.")


def _nested(flat: dict[str, str]) -> dict[str, Any]:
    """`{"prices_cloud_input": "1"}` -> `{"prices": {"cloud_input": "1"}}`: variables have no tables."""
    prices = {name.removeprefix("prices_"): value for name, value in flat.items() if name.startswith("prices_")}
    rest: dict[str, Any] = {name: value for name, value in flat.items() if not name.startswith("prices_")}
    return {**rest, "prices": prices} if prices else rest


def _decode(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value).expanduser()
    raise ValueError(f"expected {kind.__name__}, got {value!r}")


def _base_url(url: str) -> str:
    import httpx

    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigurationError(f"cloud_url {url!r} is not a URL: {error}", param="cloud_url") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigurationError(f"cloud_url {url!r} must start with http:// or https://.", param="cloud_url")
    if parsed.userinfo:
        raise ConfigurationError("cloud_url must hold no credentials: set cloud_api_key instead.", param="cloud_url")
    path = parsed.path.rstrip("/") or "/v1"
    return str(parsed.copy_with(path=path, query=None, fragment=None))


def _check(holds: bool, name: str, wanted: str) -> None:
    if not holds:  # NaN fails every comparison, so it lands here too
        raise ConfigurationError(f"{name} must be {wanted}.", param=name)
